"""OpenAI's newer interface: `/v1/responses`."""

import base64
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..generation.answer_parts import Block, Blocks, Change
from ..generation.scheduling import Event
from . import schemas
from .answers import Answer, Sent, TextParts, Usage
from .chat import Conversation, chat_endpoint
from .errors import RequestError
from .kept import KeptResponses, new_name, not_kept
from .service import Endpoint, Service
from .turns import Tagged, Turns

_log = logging.getLogger(__name__)
_SEALED = "mmfree-thought:"
"""The mark before a thought that goes to the client and comes back as `encrypted_content`."""


class Part(Tagged):
    """A part of the content of an item."""

    kinds: ClassVar[Mapping[str, str]] = {
        "input_text": "text prompt_cache_breakpoint?",
        "output_text": "text annotations? logprobs?",
        "refusal": "refusal",
        "reasoning_text": "text",
        "summary_text": "text",
        "text": "text",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "input_image": "models here read no pictures",
        "input_file": "models here read no files",
        "input_audio": "models here hear nothing",
    }

    text: str = ""
    refusal: str = ""
    # what changes no answer
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[Part], BeforeValidator(_parts)]
_STATE = "id? status?"


class Item(Tagged):
    """An item of a conversation."""

    kinds: ClassVar[Mapping[str, str]] = {
        "message": f"role content phase? {_STATE}",
        "reasoning": f"summary? content? encrypted_content? {_STATE}",
        "function_call": f"call_id name arguments namespace? {_STATE}",
        "function_call_output": f"call_id output {_STATE}",
    }

    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)
    encrypted_content: str = ""
    call_id: str = ""
    name: str = ""
    arguments: Annotated[dict[str, Any], BeforeValidator(schemas.call_arguments)] = Field(
        default_factory=dict
    )
    output: Parts = Field(default_factory=list)
    id: str = ""
    # what changes no answer
    status: str = ""
    phase: str = ""
    namespace: str = ""

    def add_to(self, turns: Turns) -> None:
        """Adds it to the turns of a chat."""
        text = _joined(self.content)
        match self.type, self.role:
            case "message", "assistant":
                turns.say(text)
            case "message", "user":
                turns.ask(text)
            case "message", _:
                turns.instruct(text)
            case "reasoning", _:
                turns.think(text or _unsealed(self.encrypted_content) or _joined(self.summary))
            case "function_call", _:
                turns.call(self.call_id, self.name, self.arguments)
            case "function_call_output", _:
                turns.result(self.call_id, _joined(self.output))


def _joined(parts: Sequence[Part]) -> str:
    return "".join(part.text + part.refusal for part in parts)


def _sealed(thought: str) -> str:
    return base64.b64encode(f"{_SEALED}{thought}".encode()).decode()


def _unsealed(content: str) -> str:
    """The thought that this server has sent so; nothing of what others have encrypted."""
    with suppress(ValueError):
        text = base64.b64decode(content, validate=True).decode()
        if text.startswith(_SEALED):
            return text.removeprefix(_SEALED)
    return ""


def _items(value: Any) -> Any:
    """One text or items; those without a type are messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        for item in value
    ]


class FunctionTool(schemas.Body):
    """A function that an answer may ask to call."""

    type: Literal["function"]
    name: schemas.Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: schemas.Strict = None


_HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom"),
    *("file_search", "image_generation", "local_shell", "mcp", "namespace", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
)


@cache
def _left_out(kind: str) -> None:
    """Says in the log that models are not told of tools of a kind, the first time that one comes."""
    _log.info("Requests offer tools of type '%s', of which models here are not told.", kind)


def _functions(value: Any) -> Any:
    """The tools that are functions. Agents always name others too, which no model here can call."""
    schemas.checked_tools(value)
    if not isinstance(value, list):
        return value
    kept = []
    for tool in value:
        if isinstance(tool, dict) and tool.get("type") in _HOSTED:
            _left_out(tool["type"])
        else:
            kept.append(tool)
    if value and not kept:
        raise ValueError("must have a tool of type 'function', since this server runs no others,")
    return kept


def _tool_choice(value: Any) -> Any:
    if value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.keys() == {"type", "name"} and value["type"] == "function":
        return {"type": "function", "function": {"name": value["name"]}}
    raise ValueError("must be 'auto', 'none', 'required' or an object that names a function")


class Reasoning(schemas.Body):
    """How much an answer is thought about."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # thoughts are shown as they are
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(schemas.JsonSchema):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: schemas.Name = "answer"

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have a 'schema' if its type is 'json_schema', and only then,")
        return self


class TextConfig(schemas.Body):
    """The form of an answer, and how long it likes to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(schemas.Body):
    """How an answer streams."""

    include_obfuscation: bool = False


_ENCRYPTED = "reasoning.encrypted_content"


class ResponsesRequest(schemas.Body):
    """A request for the next answer of a conversation."""

    neutral: ClassVar[Mapping[str, Any]] = {
        "background": (False,),
        "conversation": (),
        "max_tool_calls": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    hints: ClassVar[frozenset[str]] = schemas.HINTS - {"metadata"} | {
        "client_metadata",
        "context_management",
        "prompt_cache_options",
    }

    model: str | None = None
    input: Annotated[
        list[Item], Field(max_length=schemas.MAX_MESSAGES), BeforeValidator(_items)
    ] = Field(default_factory=list)
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    text: TextConfig = TextConfig()
    tool_choice: Annotated[str | dict[str, Any], PlainValidator(_tool_choice)] = "auto"
    tools: Annotated[
        list[FunctionTool], Field(max_length=schemas.MAX_TOOLS), BeforeValidator(_functions)
    ] = Field(default_factory=list)
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    user: schemas.User = ""

    def as_chat(self, before: Sequence[Item]) -> schemas.ChatRequest:
        """The request that it makes, after the items of earlier responses.

        Raises:
            RequestError: It asks for what no chat can.
        """
        turns = Turns()
        if self.instructions is not None:
            turns.instruct(self.instructions)
        for item in [*before, *self.input]:
            item.add_to(turns)
        names = ("model", "stream", "temperature", "top_p", "user", "tool_choice")
        values = {name: getattr(self, name) for name in (*names, "parallel_tool_calls")}
        values |= {"messages": turns.messages, "max_tokens": self.max_output_tokens}
        if self.reasoning.effort is not None:
            values["chat_template_kwargs"] = {"reasoning_effort": self.reasoning.effort}
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in self.tools
        ]
        if (form := self.text.format) is not None:
            schema = form.model_dump(exclude={"type"}, by_alias=True)
            is_schema = form.type == "json_schema"
            values["response_format"] = {"type": form.type} | (
                {"json_schema": schema} if is_schema else {}
            )
        return schemas.checked(schemas.ChatRequest, values)

    def items(self) -> list[dict[str, Any]]:
        """Its own items, as they are kept and listed, each with a name of its own."""
        listed: dict[str, dict[str, Any]] = {}
        for item in self.input:
            values = _listed(item)
            if values["id"] in listed:
                values["id"] = _new_id(item.type)
            listed[values["id"]] = values
        return list(listed.values())


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _new_id(kind: str) -> str:
    return f"{_PREFIXES.get(kind, 'fco')}_{secrets.token_hex(12)}"


def _listed(item: Item) -> dict[str, Any]:
    values = item.model_dump(exclude_unset=True, exclude_none=True)
    values["id"] = item.id or _new_id(item.type)
    values.setdefault("status", "completed")
    if "arguments" in values:
        values["arguments"] = json.dumps(item.arguments, ensure_ascii=False)
    if "output" in values:
        values["output"] = _joined(item.output)
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        texts = [part.text + part.refusal for part in item.content]
        values["content"] = [{"type": kind, "text": text} for text in texts]
    return values


class ResponsesAnswer(Answer):
    """A response to a conversation.

    Args:
        body: The request.
        found: What is written for it.
        kept: Keeps it once it is complete, if it is to be kept.
    """

    def __init__(self, body: ResponsesRequest, found: Conversation, kept: KeptResponses):
        self.usage = Usage(texts_a_prompt=1)
        self._body = body
        self._kept = kept
        self._parts = TextParts(found.make_reader())
        self._blocks = Blocks()
        self._ids: list[str] = []
        self._sent = 0
        self._name = new_name()
        asked = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
                *("previous_response_id", "store", "temperature", "top_p", "user"),
            }
        )
        form = body.text.format
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True)
        choice = body.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", **choice["function"]}
        self._head = {
            "id": self._name,
            "object": "response",
            "created_at": int(time.time()),
            "model": found.served.name,
            **asked,
            "background": False,
            "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            "text": {"format": shown},
            "tool_choice": choice,
            "tools": [tool.model_dump() for tool in body.tools],
            "truncation": "disabled",
        }

    def opening(self) -> list[Sent]:
        response = self._response("in_progress")
        return [
            self._event(kind, response=response)
            for kind in ("response.created", "response.in_progress")
        ]

    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        return [
            event
            for part in self._parts.add(events)
            for change in self._blocks.add(part)
            for event in self._changed(change)
        ]

    def closing(self) -> list[Sent]:
        whole = self.whole()
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failed(self, error: RequestError) -> list[Sent]:
        told = {"code": error.code or "server_error", "message": str(error)}
        response = self._response("failed") | {"error": told}
        return [self._event("response.failed", response=response)]

    def whole(self) -> Sent:
        finish = self._blocks.finish
        assert finish is not None
        is_cut = finish.reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store:
            items = self._body.items()
            record = {"previous": self._body.previous_response_id, "input": items}
            size = len(json.dumps([items, response["output"]]))
            self._kept.keep(self._name, record | {"response": response, "size": size})
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """The response as it stands."""
        is_over = status != "in_progress"
        output = [self._item(index, block) for index, block in enumerate(self._blocks.all)]
        usage = {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parts.thought_tokens},
            "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
        }
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": usage if is_over else None,
        }

    def _item(self, index: int, block: Block) -> dict[str, Any]:
        """A block as an item of the output."""
        kind = {"text": "message", "thinking": "reasoning"}.get(block.kind, "function_call")
        while len(self._ids) <= index:
            self._ids.append(_new_id(kind))
        is_over = self._blocks.finish is not None
        status = "incomplete" if is_over else "in_progress"
        head = {
            "id": self._ids[index],
            "type": kind,
            "status": "completed" if block.is_complete else status,
        }
        if block.kind == "tool_call":
            return head | {"call_id": block.id, "name": block.name, "arguments": block.text}
        content = [_part(block)] if block.text else []
        if block.kind == "text":
            return head | {"role": "assistant", "content": content}
        is_asked = _ENCRYPTED in self._body.include
        sealed = {"encrypted_content": _sealed(block.text)} if is_asked else {}
        return head | {"summary": [], "content": content} | sealed

    def _changed(self, change: Change) -> Iterator[Sent]:
        """The events that tell of a change of a block."""
        block, number = change.block, change.index
        item = self._item(number, block)
        place = {"item_id": item["id"], "output_index": number}
        has_parts = block.kind != "tool_call"
        if has_parts:
            place["content_index"] = 0
        kind = {"text": "output_text", "thinking": "reasoning_text"}.get(
            block.kind, "function_call_arguments"
        )
        logs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.kind == "begin":
            yield self._event("response.output_item.added", output_index=number, item=item)
            if has_parts:
                yield self._event("response.content_part.added", **place, part=_part(block))
        elif change.kind == "grow":
            yield self._event(f"response.{kind}.delta", **place, delta=change.text, **logs)
        else:
            if has_parts:
                yield self._event(f"response.{kind}.done", **place, text=block.text, **logs)
                yield self._event("response.content_part.done", **place, part=_part(block))
            else:
                called = {"arguments": block.text, "name": block.name}
                yield self._event(f"response.{kind}.done", **place, **called)
            yield self._event("response.output_item.done", output_index=number, item=item)

    def _event(self, kind: str, **values: Any) -> Sent:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **values}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thinking":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def _is_cut_call(item: Mapping[str, Any]) -> bool:
    """Whether it is a call that ended amid its arguments, which nobody could run."""
    return item["type"] == "function_call" and item["status"] == "incomplete"


def responses(service: Service) -> Endpoint:
    """The endpoint that answers conversations."""
    kept = service.kept

    def as_chat(body: ResponsesRequest) -> schemas.ChatRequest:
        before: list[Item] = []
        if body.previous_response_id is not None:
            for record in reversed(list(kept.chain(body.previous_response_id))):
                items = [*record["input"], *record["response"]["output"]]
                before += [schemas.checked(Item, item) for item in items if not _is_cut_call(item)]
        return body.as_chat(before)

    def make_answer(body: ResponsesRequest, found: Conversation) -> Answer:
        return ResponsesAnswer(body, found, kept)

    return chat_endpoint(service, ResponsesRequest, as_chat, make_answer, names=_NAMES)


Kept = Callable[[Request], Response]


def kept_response(service: Service) -> Kept:
    """The endpoint that shows a kept response, or deletes it."""
    kept = service.kept

    def endpoint(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            if not kept.remove(name):
                raise not_kept("response_id", name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise RequestError(
                "[request] 'stream' must be left out, since a kept response is complete.",
                param="stream",
            )
        record = kept.find(name)
        if record is None:
            raise not_kept("response_id", name)
        return JSONResponse(record["response"])

    return endpoint


_MOST_LISTED = 100


def input_items(service: Service) -> Kept:
    """The endpoint that lists the items which a kept response has answered."""

    def endpoint(request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        record = service.kept.find(name)
        if record is None:
            raise not_kept("response_id", name)
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise RequestError(
                f"[request] 'order' must be asc or desc but is {order!r:.20}.", param="order"
            )
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MOST_LISTED:
            raise RequestError(
                f"[request] 'limit' must be 1 to {_MOST_LISTED} but is {limit!r:.20}.",
                param="limit",
            )
        items = record["input"] if order == "asc" else record["input"][::-1]
        ids = [item["id"] for item in items]
        if (after := query.get("after")) is not None:
            if after not in ids:
                raise RequestError(
                    f"[request] 'after' must be the id of an item but is {after!r:.80}.",
                    param="after",
                )
            items = items[ids.index(after) + 1 :]
        shown = items[: int(limit)]
        return JSONResponse(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(shown) < len(items),
            }
        )

    return endpoint

"""OpenAI's newer interface: `/v1/responses`."""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..generation.answers.answer_parts import Block, Change
from ..generation.scheduling import Event
from . import schemas
from .answers import Answer, Sent, TextParts, Usage
from .bodies import tools
from .bodies.responses import ENCRYPTED, Item, ResponsesRequest, item_id, sealed
from .chat import Conversation, chat_endpoint
from .errors import RequestError
from .service import Endpoint, Service
from .stored_responses import StoredResponses, new_name, not_stored


class ResponsesAnswer(Answer):
    """A response to a conversation.

    Args:
        body: The request.
        found: What is written for it.
        store: Stores it once it is complete, if the request asks for that.
    """

    def __init__(self, body: ResponsesRequest, found: Conversation, store: StoredResponses):
        self.usage = Usage(texts_a_prompt=1)
        self._body = body
        self._store = store
        self._parts = TextParts(found.make_reader())
        self._ids: list[str] = []
        self._sent = 0
        self._name = new_name()
        asked = body.model_dump(
            include={
                *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls"),
                *("previous_response_id", "store", "temperature", "top_p", "user"),
            }
        )
        format = body.text.format
        shown = {"type": "text"} if format is None else format.model_dump(by_alias=True)
        choice = body.tool_choice
        if isinstance(choice, dict):
            choice = {name: value for name, value in choice.items() if name != "called"}
        self._tools = tools.offered(body.tools)
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
            "tools": [tool.shown() for tool in body.tools],
            "truncation": "disabled",
        }

    def opening(self) -> list[Sent]:
        response = self._response("in_progress", ())
        return [self._event("response.created", response=response), *self.waiting()]

    def waiting(self) -> list[Sent]:
        response = self._response("in_progress", self._parts.blocks.all)
        return [self._event("response.in_progress", response=response)]

    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        changes = self._parts.add(events)
        return [event for change in changes for event in self._changed(change)]

    def closing(self) -> list[Sent]:
        response = self._ended(self._parts.blocks.all)
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, error: RequestError) -> list[Sent]:
        reported = {"code": error.code or "server_error", "message": str(error)}
        response = self._response("failed", self._parts.blocks.all) | {"error": reported}
        return [self._event("response.failed", response=response)]

    def whole(self) -> Sent:
        return self._ended(self._parts.blocks.whole)

    def _ended(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """The response that these blocks make, which is kept if it is to be."""
        finish = self._parts.blocks.finish
        assert finish is not None
        is_cut = finish.reason == "length"
        response = self._response("incomplete" if is_cut else "completed", blocks)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store:
            items = self._body.items(self._name)
            record = {"previous": self._body.previous_response_id, "input": items}
            size = len(json.dumps([items, response["output"]]))
            is_stored = self._store.keep(self._name, record | {"response": response, "size": size})
            response["store"] = is_stored
        return response

    def _response(self, status: str, blocks: Sequence[Block]) -> dict[str, Any]:
        """The response so far."""
        is_over = status != "in_progress"
        open_status = "incomplete" if is_over else status
        output = [self._item(index, block, open_status) for index, block in enumerate(blocks)]
        usage = {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parts.reasoning_tokens},
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

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        """A block as an item of the output, with a status unless the block is complete."""
        kind = self._kind(block).item
        while len(self._ids) <= index:
            # the items of the input come first
            number = len(self._body.input) + len(self._ids)
            self._ids.append(item_id(kind, self._name, number))
        head = {
            "id": self._ids[index],
            "type": kind,
            "status": "completed" if block.is_complete else status,
        }
        if block.kind == "tool_call":
            call = tools.CALLS[kind]
            return head | {
                "call_id": block.id,
                **self._named(block),
                call.key: call.shown(block.text),
            }
        content = [_part(block)] if block.text else []
        if block.kind == "text":
            return head | {"role": "assistant", "content": content}
        is_asked = ENCRYPTED in self._body.include
        shown = {"encrypted_content": sealed(block.text)} if is_asked else {}
        return head | {"summary": [], "content": content} | shown

    def _changed(self, change: Change) -> Iterator[Sent]:
        """The events that tell of a change of a block."""
        block, number = change.block, change.index
        kind = self._kind(block)
        item = self._item(number, block, "in_progress")
        position = {"item_id": item["id"], "output_index": number, **kind.position}
        text = item.get(kind.text, block.text)
        if change.kind == "begin":
            yield self._event("response.output_item.added", output_index=number, item=item)
            if kind.position:
                yield self._event("response.content_part.added", **position, part=_part(block))
        elif change.kind == "grow":
            if kind.streams:
                yield self._event(
                    f"response.{kind.events}.delta", **position, delta=text, **kind.more
                )
        else:
            if kind.events and not kind.streams:
                yield self._event(f"response.{kind.events}.delta", **position, delta=text)
            if kind.events:
                name = self._named(block) if kind.streams else {}
                reported = {kind.text: text, **name, **kind.more}
                yield self._event(f"response.{kind.events}.done", **position, **reported)
            if kind.position:
                yield self._event("response.content_part.done", **position, part=_part(block))
            yield self._event("response.output_item.done", output_index=number, item=item)

    def _kind(self, block: Block) -> "_Kind":
        """How a block is shown; a call has the kind of its tool."""
        tool = self._tools.get(block.name)
        return _KINDS[block.kind if tool is None else tool.kind.item]

    def _named(self, block: Block) -> dict[str, str]:
        """The name of a call, if it has one, with the name of its namespace apart."""
        if not block.name:
            return {}
        tool = self._tools.get(block.name)
        return {"name": block.name} if tool is None else tool.named

    def _event(self, kind: str, **values: Any) -> Sent:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **values}


@dataclass(frozen=True)
class _Kind:
    """How a kind of block is shown.

    Attributes:
        item: The type of its item.
        events: What the types of its events begin with; nothing if its items alone tell of it.
        text: Under which name an event has all of its text.
        position: The indices of its text in the item; nothing if the item has no parts.
        more: What events with text have beside it.
        streams: Whether its text comes as it is written; otherwise it comes whole.
    """

    item: str
    events: str
    text: str = "text"
    position: Mapping[str, int] = field(default_factory=lambda: {"content_index": 0})
    more: Mapping[str, Any] = field(default_factory=dict)
    streams: bool = True


_CALL = _Kind("function_call", "function_call_arguments", "arguments", {})
_KINDS: Mapping[str, _Kind] = {
    "thinking": _Kind("reasoning", "reasoning_text"),
    "text": _Kind("message", "output_text", more={"logprobs": []}),
    "tool_call": _CALL,
    "function_call": _CALL,
    "custom_tool_call": _Kind(
        "custom_tool_call", "custom_tool_call_input", "input", {}, streams=False
    ),
    "local_shell_call": _Kind("local_shell_call", "", "", {}, streams=False),
    "shell_call": _Kind("shell_call", "", "", {}, streams=False),
    "apply_patch_call": _Kind("apply_patch_call", "", "", {}, streams=False),
}


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
    """Returns whether it is a call that ended amid its arguments, which nobody could run."""
    return item["type"] in tools.CALLS and item["status"] == "incomplete"


def responses(service: Service) -> Endpoint:
    """The endpoint that answers conversations."""
    store = service.stored_responses

    def as_chat(body: ResponsesRequest) -> schemas.ChatRequest:
        found = store.items(body.references)
        body.refer({name: schemas.checked(Item, item) for name, item in found.items()})
        before: list[Item] = []
        if body.previous_response_id is not None:
            for record in reversed(list(store.chain(body.previous_response_id))):
                items = [*record["input"], *record["response"]["output"]]
                before += [schemas.checked(Item, item) for item in items if not _is_cut_call(item)]
        return body.as_chat(before)

    def make_answer(body: ResponsesRequest, found: Conversation) -> Answer:
        return ResponsesAnswer(body, found, store)

    return chat_endpoint(service, ResponsesRequest, as_chat, make_answer, names=_NAMES)


StoredEndpoint = Callable[[Request], Response]


def stored_response(service: Service) -> StoredEndpoint:
    """The endpoint that shows a stored response, or deletes it."""
    store = service.stored_responses

    def endpoint(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "DELETE":
            if not store.remove(name):
                raise not_stored("response_id", name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        if request.query_params.get("stream", "false") != "false":
            raise RequestError(
                "[request] 'stream' must be left out, since a stored response is complete.",
                param="stream",
            )
        record = store.find(name)
        if record is None:
            raise not_stored("response_id", name)
        return JSONResponse(record["response"])

    return endpoint


_MOST_LISTED = 100


def input_items(service: Service) -> StoredEndpoint:
    """The endpoint that lists the items which a stored response has answered."""

    def endpoint(request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        record = service.stored_responses.find(name)
        if record is None:
            raise not_stored("response_id", name)
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

"""Anthropic's interface: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..generation.answer_parts import Block, Blocks, Change
from ..generation.scheduling import Event
from . import schemas
from .answers import Answer, Sent, TextParts, Usage
from .chat import Conversation, chat_endpoint, read
from .errors import ANTHROPIC, RequestError
from .service import Endpoint, Service
from .turns import Tagged, Turns

VERSIONS = ("2026-10-21", "2023-06-01")
"""The values of the header `anthropic-version` whose form this is; the later one has no sampling."""


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ContentBlock(Tagged):
    """A part of a message."""

    kinds: ClassVar[Mapping[str, str]] = {
        "text": "text cache_control? citations?",
        "thinking": "thinking signature? cache_control?",
        "redacted_thinking": "data",
        "tool_use": "id name input cache_control? caller?",
        "tool_result": "tool_use_id content? is_error? cache_control?",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "image": "models here read no pictures",
        "document": "models here read no documents but text",
        "container_upload": "this server runs no code",
        "server_tool_use": "this server runs no tools",
        "web_search_tool_result": "this server runs no tools",
    }

    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Annotated[list["ContentBlock"], BeforeValidator(_blocks)] = Field(default_factory=list)
    is_error: bool = False
    # what changes no answer
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


Content = Annotated[list[ContentBlock], BeforeValidator(_blocks)]
_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class Message(schemas.Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content

    @model_validator(mode="after")
    def _has_its_blocks(self) -> "Message":
        for block in self.content:
            if block.type not in _ALLOWED[self.role]:
                raise ValueError(f"must have no {block.type!r} where its role is {self.role!r}")
            if any(part.type != "text" for part in block.content):
                raise ValueError("must have nothing but text in a 'tool_result'")
        return self

    def add_to(self, turns: Turns) -> None:
        """Adds it to the turns of a chat."""
        for block in self.content:
            match block.type:
                case "text" if self.role == "assistant":
                    turns.say(block.text)
                case "text" if self.role == "system":
                    turns.instruct(block.text)
                case "text":
                    turns.ask(block.text)
                case "thinking":
                    turns.think(block.thinking)
                case "tool_use":
                    turns.call(block.id, block.name, block.input)
                case "tool_result":
                    turns.result(block.tool_use_id, "\n".join(b.text for b in block.content))


class Tool(schemas.Body):
    """A tool that an answer may ask for."""

    name: schemas.Name
    input_schema: dict[str, Any]
    description: str = ""
    strict: schemas.Strict = None
    type: Literal["custom"] | None = None
    # what changes no answer
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    input_examples: Any = None

    @model_validator(mode="before")
    @classmethod
    def _is_of_the_client(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (None, "custom"):
            raise ValueError(
                "must be a tool of the client, without 'type' or of type 'custom', since this server "
                "runs no tools,"
            )
        return value


class ToolChoice(schemas.Body):
    """Which tool an answer must ask for."""

    type: Literal["auto", "any", "tool", "none"]
    name: schemas.Name | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "ToolChoice":
        if self.type == "tool" and self.name is None:
            raise ValueError("must have a 'name' where its type is 'tool'")
        return self

    def as_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"any": "required"}.get(self.type, self.type)


class Thinking(schemas.Body):
    """Whether an answer begins with a thought, and how long that may be."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(schemas.Body):
    """A schema that an answer must follow."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(schemas.Body):
    """The effort and the form of an answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _ends_with_a_question(value: list[Message]) -> list[Message]:
    if value[-1].role == "assistant":
        raise ValueError("must end with a turn of the user, since answers begin anew,")
    return value


def _is_text(value: list[ContentBlock]) -> list[ContentBlock]:
    if any(block.type != "text" for block in value):
        raise ValueError("must have nothing but text")
    return value


class CountRequest(schemas.Body):
    """A conversation whose tokens are counted."""

    neutral: ClassVar[Mapping[str, Any]] = {"container": (), "mcp_servers": ([],), "thread": ()}
    hints: ClassVar[frozenset[str]] = schemas.HINTS | {
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "speed",
    }

    model: str | None = None
    messages: Annotated[
        list[Message],
        Field(min_length=1, max_length=schemas.MAX_MESSAGES),
        AfterValidator(_ends_with_a_question),
    ]
    system: Annotated[Content, AfterValidator(_is_text)] = Field(default_factory=list)
    tools: Annotated[
        list[Tool], Field(max_length=schemas.MAX_TOOLS), BeforeValidator(schemas.checked_tools)
    ] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def as_chat(self) -> schemas.ChatRequest:
        """The request that it makes.

        Raises:
            RequestError: It asks for what no chat can.
        """
        return schemas.checked(schemas.ChatRequest, self._values())

    def _values(self) -> dict[str, Any]:
        turns = Turns()
        for block in self.system:
            turns.instruct(block.text)
        for message in self.messages:
            message.add_to(turns)
        variables: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            variables["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        values: dict[str, Any] = {
            "model": self.model,
            "messages": turns.messages,
            "chat_template_kwargs": variables,
            "tool_choice": self.tool_choice.as_chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                        "strict": tool.strict,
                    },
                }
                for tool in self.tools
            ],
        }
        if self.thinking is not None and self.thinking.type == "enabled":
            values["reasoning_budget"] = self.thinking.budget_tokens
        if (form := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": form.json_schema}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return values


class MessagesRequest(CountRequest):
    """A request for the next answer of a conversation."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], BeforeValidator(schemas.stop_strings)] = Field(
        default_factory=list
    )
    stream: bool = False
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None

    def _values(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        own = {name: getattr(self, name) for name in names}
        return super()._values() | own | {"stop": self.stop_sequences}


class MessagesAnswer(Answer):
    """A message that answers a conversation.

    Args:
        body: The request.
        found: What is written for it.
    """

    def __init__(self, body: MessagesRequest, found: Conversation):
        self.usage = Usage(texts_a_prompt=1)
        self._body = body
        self._parts = TextParts(found.make_reader())
        self._blocks = Blocks()
        (text,) = found.texts
        self._prompt_tokens = len(text.tokens)
        self._is_cut = text.max_tokens < body.max_tokens
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": found.served.name,
        }

    def opening(self) -> list[Sent]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [{"type": "message_start", "message": self._head | nothing}, {"type": "ping"}]

    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        parts = self._parts.add(events)
        return [_sent(change) for part in parts for change in self._blocks.add(part)]

    def closing(self) -> list[Sent]:
        delta = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, error: RequestError) -> list[Sent]:
        return [error.body(ANTHROPIC)]

    def whole(self) -> Sent:
        # nobody can run a call that was cut
        blocks = [block for block in self._blocks.all if block.is_complete]
        content = {"content": [_shown(block) for block in blocks]}
        return self._head | content | self._end() | {"usage": self._usage()}

    def _end(self) -> dict[str, Any]:
        finish = self._blocks.finish
        assert finish is not None
        if finish.reason == "stop" and finish.stop_string in self._body.stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
        full = "model_context_window_exceeded" if self._is_cut else "max_tokens"
        reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": full}
        return {"stop_reason": reasons[finish.reason], "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        cached = self.usage.cached_tokens
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.usage.completion_tokens,
        }


def _shown(block: Block) -> dict[str, Any]:
    """A block as a message has it."""
    if block.kind == "tool_call":
        arguments = json.loads(block.text or "{}")
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _sent(change: Change) -> Sent:
    """The event of a stream for a change."""
    if change.kind == "begin":
        block = _shown(Block(change.block.kind, name=change.block.name, id=change.block.id))
        return {"type": "content_block_start", "index": change.index, "content_block": block}
    if change.kind == "end":
        return {"type": "content_block_stop", "index": change.index}
    kind, name = _DELTAS[change.block.kind]
    delta = {"type": kind, name: change.text}
    return {"type": "content_block_delta", "index": change.index, "delta": delta}


_NAMES = {"stop": "stop_sequences", "response_format": "output_config"}


def messages(service: Service) -> Endpoint:
    """The endpoint that answers conversations."""
    answer = chat_endpoint(
        service,
        MessagesRequest,
        MessagesRequest.as_chat,
        MessagesAnswer,
        names=_NAMES,
        # the limit of tokens is a bound here, and not what must fit
        caps_length=True,
    )

    async def endpoint(request: Request) -> Response:
        _check_version(request)
        return await answer(request)

    return endpoint


def count_tokens(service: Service) -> Endpoint:
    """The endpoint that counts the tokens of conversations."""

    def count(body: CountRequest) -> int:
        try:
            _, prompt, _ = read(service, body.as_chat())
        except RequestError as error:
            raise error.renamed(_NAMES) from error
        return len(prompt.tokens)

    async def endpoint(request: Request) -> Response:
        _check_version(request)
        return JSONResponse({"input_tokens": await service.prepared(request, CountRequest, count)})

    return endpoint


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise RequestError(
            f"[request] the header 'anthropic-version' must be {' or '.join(VERSIONS)} but is "
            f"{version!r:.60}."
        )

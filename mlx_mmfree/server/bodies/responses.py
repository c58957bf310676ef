"""The bodies of OpenAI's newer interface, `/v1/responses`."""

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, model_validator

from .. import schemas
from ..turns import Tagged, Turns
from . import tools
from .tools import ClientTool, client_tools

_SEALED = "mmfree-thought:"
"""The mark before reasoning that goes to the client and comes back as `encrypted_content`."""


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
        "input_image": f"models here read no pictures: {schemas.HINT}",
        "input_file": f"models here read no files: {schemas.HINT}",
        "input_audio": f"models here hear nothing: {schemas.HINT}",
    }

    text: str = ""
    refusal: str = ""
    # what changes no answer
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[schemas.Each[Part], BeforeValidator(_parts)]
_STATE = "id? status?"
_CALL = f"{_STATE} async? caller? created_by?"


def _output_text(value: Any) -> Any:
    """The text of a tool's output, which for a shell comes in parts of its own."""
    if not isinstance(value, list):
        return schemas.result_text(value)
    return schemas.result_text([_of_shell(part) for part in value])


def _of_shell(part: Any) -> Any:
    """The output of a shell command, and how it ended, as a part with a text."""
    if not isinstance(part, dict) or "stdout" not in part:
        return part
    outcome = part.get("outcome")
    outcome = outcome if isinstance(outcome, dict) else {}
    ended = f"exit code {outcome['exit_code']}" if "exit_code" in outcome else outcome.get("type")
    texts = [part["stdout"], part.get("stderr"), f"[{ended}]" if ended else ""]
    return {"text": schemas.in_lines(text for text in texts if isinstance(text, str))}


class Item(Tagged):
    """An item of a conversation."""

    kinds: ClassVar[Mapping[str, str]] = {
        "message": f"role content phase? {_STATE}",
        "reasoning": f"summary? content? encrypted_content? {_STATE}",
        "function_call": f"call_id name arguments? namespace? {_CALL}",
        "function_call_output": f"call_id output name? namespace? {_CALL}",
        "custom_tool_call": f"call_id name input namespace? {_CALL}",
        "custom_tool_call_output": f"call_id output name? namespace? {_CALL}",
        "local_shell_call": f"call_id action {_CALL}",
        "local_shell_call_output": f"call_id? output {_CALL}",
        "shell_call": f"call_id action environment? {_CALL}",
        "shell_call_output": f"call_id output max_output_length? {_CALL}",
        "apply_patch_call": f"call_id operation {_CALL}",
        "apply_patch_call_output": f"call_id output? {_CALL}",
        "item_reference": "id",
    }
    unread: ClassVar[frozenset[str]] = frozenset(
        {"async", "caller", "created_by", "environment", "max_output_length"}
    )

    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)
    encrypted_content: str = ""
    call_id: str = ""
    name: str = ""
    arguments: Annotated[schemas.Arguments, PlainValidator(schemas.call_arguments)] = Field(
        default_factory=dict
    )
    input: str = ""
    action: Any = None
    operation: Any = None
    output: Annotated[str, BeforeValidator(_output_text)] = ""
    id: str = ""
    # what changes no answer
    status: str = ""
    phase: str = ""
    namespace: str = ""

    def add_to(self, turns: Turns) -> None:
        """Adds it to the turns of a chat."""
        text = _concatenated(self.content)
        asked = schemas.in_lines(part.text + part.refusal for part in self.content)
        match self.type, self.role:
            case "message", "assistant":
                turns.say(text)
            case "message", "user":
                turns.ask(asked)
            case "message", _:
                turns.instruct(asked)
            case "reasoning", _:
                turns.think(
                    text or _unsealed(self.encrypted_content) or _concatenated(self.summary)
                )
            case kind, _ if kind in tools.CALLS:
                call = tools.CALLS[kind]
                name = tools.full_name(self.name, self.namespace) if self.name else call.name
                turns.call(self.call_id, name, call.read(getattr(self, call.key)))
            case _:
                # for the oldest kind, the id is the call's
                turns.result(self.call_id or self.id, self.output or self.status)


def _concatenated(parts: Sequence[Part]) -> str:
    return "".join(part.text + part.refusal for part in parts)


def sealed(reasoning_text: str) -> str:
    """Reasoning as `encrypted_content`."""
    return base64.b64encode(f"{_SEALED}{reasoning_text}".encode()).decode()


def _unsealed(content: str) -> str:
    """The reasoning that this server has sent so; nothing of what others have encrypted."""
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
    return [_with_type(item) if isinstance(item, dict) else item for item in value]


def _with_type(item: dict[str, Any]) -> dict[str, Any]:
    if "role" in item:
        return {"type": "message", **item}
    return {"type": "item_reference", **item} if item.keys() == {"id"} else item


_MAX_METADATA = 16


def _is_short(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_METADATA:
        raise ValueError(f"must have at most {_MAX_METADATA} names but has {len(value):,},")
    return value


class Reasoning(schemas.Body):
    """How much the model reasons before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # reasoning is shown as it is
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(schemas.JsonSchema):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: schemas.Name = "answer"

    @model_validator(mode="after")
    def _has_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have a 'schema' if its type is 'json_schema', and only then,")
        return self


class TextConfig(schemas.Body):
    """The format of an answer, and how long it likes to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(schemas.Body):
    """How an answer streams."""

    include_obfuscation: bool = False


ENCRYPTED = "reasoning.encrypted_content"


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
        schemas.Each[Item], Field(max_length=schemas.MAX_MESSAGES), BeforeValidator(_items)
    ] = Field(default_factory=list)
    include: schemas.Each[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: schemas.Tokens = None
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        BeforeValidator(_is_short),
    ] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = Reasoning()
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, schemas.number(0, 2)] = None
    text: TextConfig = TextConfig()
    tool_choice: Annotated[str | dict[str, Any], PlainValidator(tools.tool_choice)] = "auto"
    tools: Annotated[
        schemas.Each[ClientTool],
        Field(max_length=schemas.MAX_TOOLS),
        BeforeValidator(client_tools),
    ] = Field(default_factory=list)
    top_p: schemas.TopP = None
    user: schemas.User = ""

    _found: Mapping[str, Item] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> dict[str, str]:
        """The ids of items that are sent by these alone, and where each stands first."""
        names: dict[str, str] = {}
        for number, item in enumerate(self.input):
            if item.type == "item_reference":
                names.setdefault(item.id, f"input[{number}]")
        return names

    def refer(self, found: Mapping[str, Item]) -> None:
        """Takes the items that are sent by their ids alone."""
        self._found = found

    @property
    def conversation(self) -> list[Item]:
        """The items of the input, also those that are sent by their ids alone."""
        is_sent = "item_reference"
        return [self._found[item.id] if item.type == is_sent else item for item in self.input]

    def as_chat(self, before: Sequence[Item]) -> schemas.ChatRequest:
        """The request that it makes, after the items of earlier responses.

        Raises:
            RequestError: It asks for what no chat can.
        """
        turns = Turns()
        if self.instructions is not None:
            turns.at("instructions").instruct(self.instructions)
        for number, item in enumerate([*before, *self.conversation], -len(before)):
            origin = "previous_response_id" if number < 0 else f"input[{number}]"
            item.add_to(turns.at(origin))
        names = ("model", "stream", "temperature", "top_p", "user")
        values = {name: getattr(self, name) for name in (*names, "parallel_tool_calls")}
        values |= {"messages": turns.messages, "max_tokens": self.max_output_tokens}
        if self.reasoning.effort is not None:
            values["chat_template_kwargs"] = {"reasoning_effort": self.reasoning.effort}
        offered = tools.offered(self.tools)
        values["tools"] = [each.function() for each in offered.values()]
        values["tool_choice"] = tools.chosen(self.tool_choice, offered)
        if (format := self.text.format) is not None:
            schema = format.model_dump(exclude={"type"}, by_alias=True)
            is_schema = format.type == "json_schema"
            values["response_format"] = {"type": format.type} | (
                {"json_schema": schema} if is_schema else {}
            )
        return schemas.checked(schemas.ChatRequest, values).from_origins(turns.origins)

    def items(self, response: str) -> list[dict[str, Any]]:
        """Its own items, as they are kept with a response and listed, each with a name of its own."""
        listed: dict[str, dict[str, Any]] = {}
        for number, item in enumerate(self.conversation):
            own = item_id(item.type, response, number)
            values = _listed(item, own)
            if values["id"] in listed:
                values["id"] = own
            listed[values["id"]] = values
        return list(listed.values())


_PREFIXES = {"message": "msg", "reasoning": "rs"} | {
    kind: call.prefix for kind, call in tools.CALLS.items()
}


def item_id(kind: str, response: str, number: int) -> str:
    """The identifier of an item, which tells with which response it is kept."""
    return f"{_PREFIXES.get(kind, 'fco')}_{response.removeprefix('resp_')}{number:x}"


def _listed(item: Item, own_id: str) -> dict[str, Any]:
    values = item.model_dump(exclude_unset=True, exclude_none=True)
    values["id"] = item.id or own_id
    values.setdefault("status", "completed")
    if "arguments" in values:
        is_text = isinstance(item.arguments, str)
        values["arguments"] = (
            item.arguments if is_text else json.dumps(item.arguments, ensure_ascii=False)
        )
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        texts = [part.text + part.refusal for part in item.content]
        values["content"] = [{"type": kind, "text": text} for text in texts]
    return values

"""The schemas of requests' bodies, and the error of one that does not fit."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field

from ..files.reading import parse_json
from .errors import RequestError

_log = logging.getLogger(__name__)

_MAX_SHOWN = 60
_LONGEST_NAME = 100


HINTS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    }
)
"""The hints of every interface."""


class Body(pydantic.BaseModel):
    """A part of a request: every name is known, and every value has its own type.

    Attributes:
        neutral: Names that other servers know, with the values that ask for nothing. Any other value
            is refused by name.
        hints: Names that clients send for a server's own use, and that no answer depends on.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True
    )

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    hints: ClassVar[frozenset[str]] = HINTS

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # as in OpenAI's interface, null is the same as nothing
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


@cache
def named_once(hint: str) -> None:
    """Says in the log that a hint means nothing here, the first time that one comes."""
    _log.info("Requests have '%s', a hint for which this server has no use.", hint)


B = TypeVar("B", bound=Body)


def checked_body(kind: type[B], text: bytes, max_bytes: int) -> B:
    """The body of a request.

    Args:
        kind: What it must look like.
        text: The body as it came.
        max_bytes: The largest length of the text.

    Raises:
        RequestError: It is not JSON, lacks a parameter, or has one that is wrong or unknown. A hint
            is left out.
    """
    try:
        value = parse_json(text, max_bytes=max_bytes, unique_keys=True)
    except ValueError as error:
        raise RequestError(f"[request] the body {error}.") from error
    if not isinstance(value, dict):
        raise RequestError(f"[request] the body must be a JSON object but is {_shown(value)}.")
    known = {name: item for name, item in value.items() if item is not None}
    for name, allowed in kind.neutral.items():
        if name in known and not _is_one_of(known.pop(name), allowed):
            raise _unsupported(name, allowed)
    for name in value:
        if name in kind.hints:
            named_once(name)
            known.pop(name, None)
        elif name not in kind.model_fields and name not in kind.neutral:
            raise _unknown(name, {*kind.model_fields, *kind.hints})
    return checked(kind, known)


def checked(kind: type[B], values: Mapping[str, Any]) -> B:
    """A request with these values.

    Raises:
        RequestError: One is wrong or unknown.
    """
    try:
        return kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise _refusal(error) from error


def _is_one_of(value: Any, allowed: Sequence[Any]) -> bool:
    return any(value == other and type(value) is type(other) for other in allowed)


def _unsupported(name: str, allowed: Sequence[Any]) -> RequestError:
    values = "".join(f" or be {_shown(value)}" for value in allowed)
    return RequestError(
        f"[request] this server does not support '{name}'. It must be left out{values}.",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str, known: Iterable[str] = ()) -> RequestError:
    name = name[:_LONGEST_NAME]
    meant = "".join(f" Did you mean '{each}'?" for each in get_close_matches(name, known, n=1))
    return RequestError(
        f"[request] {name!r} must be left out, since this server does not know it.{meant}",
        param=name,
        code="unknown_parameter",
    )


def _refusal(error: pydantic.ValidationError) -> RequestError:
    """The first mistake, by the name of the parameter."""
    first = error.errors(include_url=False)[0]
    name = _place(first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown(name)
    if first["type"] == "missing":
        return RequestError(
            f"[request] '{name}' must be given but is missing.",
            param=name,
            code="missing_required_parameter",
        )
    rule = re.sub(r"^(Value error, |\w+ (?=should ))", "", first["msg"])
    rule = re.sub(r"^(should|must) ", "must ", rule)
    return RequestError(
        f"[request] '{name}' {rule} but got {_shown(first['input'])}.",
        param=name,
        code="invalid_value",
    )


def _place(location: tuple[int | str, ...]) -> str:
    """The name of a parameter, such as `messages[0].role`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")[:_LONGEST_NAME]


def _shown(value: Any) -> str:
    """A value as JSON writes it, short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"{value!r:.{_MAX_SHOWN}}"


MAX_STOPS = 16
_MAX_STOP_LENGTH = 1000
_MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
_INT64 = 2**63


def stop_strings(value: Any) -> Any:
    """One string or several that end a text, as a list."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("must be a string or a list of strings")
    if len(strings) > MAX_STOPS or not all(0 < len(text) <= _MAX_STOP_LENGTH for text in strings):
        raise ValueError(
            f"must hold at most {MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH} characters"
        )
    return strings


def _biases(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > _MAX_BIASES:
        raise ValueError(f"must be an object of at most {_MAX_BIASES} biases by token id")
    if not all(key.isdecimal() and key.isascii() and len(key) < 10 for key in value):
        raise ValueError("must have token ids as its keys")
    biases = {int(key): bias for key, bias in value.items()}
    if len(biases) < len(value):
        raise ValueError("must name no token id twice, as 1 and 01 do,")
    return biases


class StreamOptions(Body):
    """How an answer streams."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    # padding against listeners, which is allowed to be left out
    include_obfuscation: bool = False


Bias = Annotated[float, Field(ge=-100, le=100)]


User = Annotated[str, Field(max_length=64)]
"""Whom a request is for; it stands in the log."""


class TextRequest(Body):
    """A request for texts, of either form."""

    neutral: ClassVar[Mapping[str, Any]] = {"store": (False,)}

    model: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    repetition_context_size: Annotated[int, Field(ge=1, le=4096)] = 20
    logit_bias: Annotated[dict[int, Bias], pydantic.BeforeValidator(_biases)] = Field(
        default_factory=dict
    )
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    min_tokens_to_keep: Annotated[int | None, Field(ge=1, le=1000)] = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Annotated[int | None, Field(ge=-_INT64, lt=2 * _INT64)] = None
    stop: Annotated[list[str], pydantic.BeforeValidator(stop_strings)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_k: Annotated[int | None, Field(ge=0, le=1_000_000)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    xtc_probability: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=0.5)] = None
    user: User = ""


Prompts = list[str] | list[list[int]]


def prompts(value: Any) -> Any:
    """One prompt or several, each a text or a list of token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(map(_is_whole, value))):
        value = [value]
    are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    are_ids = isinstance(value, list) and all(
        isinstance(ids, list) and all(map(_is_whole, ids)) for ids in value
    )
    if not value or not (are_texts or are_ids):
        raise ValueError("must be a text, a list of token ids, or a list of one of them")
    if not all(value):
        raise ValueError("must hold no empty prompt")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class CompletionRequest(TextRequest):
    """A request to continue prompts."""

    neutral: ClassVar[Mapping[str, Any]] = {
        **TextRequest.neutral,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Annotated[Prompts, pydantic.PlainValidator(prompts)]
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None


class EmbeddingRequest(Body):
    """A request for the embeddings of texts."""

    input: Annotated[Prompts, pydantic.PlainValidator(prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1)] = None
    prompt_name: str | None = None
    user: User = ""


MAX_MESSAGES = 10_000
MAX_TOOLS, _MAX_TOOL_CHARACTERS = 128, 1_000_000
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "tokenize", "self")
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Strict = Literal[False] | None
"""Whether calls must follow their schema to the letter, which none is held to here."""


def _content(value: Any) -> Any:
    """The text of a message, which may come in parts."""
    if isinstance(value, str):
        return value
    is_text = isinstance(value, list) and all(
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
        for part in value
    )
    if not is_text:
        raise ValueError(
            "must be a text or a list of parts of type 'text', the only one read here,"
        )
    return "".join(part["text"] for part in value)


def call_arguments(value: Any) -> Any:
    """The arguments of an earlier call, which come as the text of a JSON object."""
    try:
        parsed = parse_json(value.encode()) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"must be the text of a JSON object: it {error},") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be the text of a JSON object")
    return parsed


def _without_nothing(value: Any) -> Any:
    """The message without what clients add to an answer that they send back, where it is empty."""
    if not isinstance(value, dict):
        return value
    empty = ("annotations", "audio", "function_call", "refusal", "tool_calls")
    return {name: item for name, item in value.items() if not (name in empty and item == [])}


class CalledFunction(Body):
    """The call that an answer asked for."""

    name: str
    arguments: Annotated[dict[str, Any], pydantic.BeforeValidator(call_arguments)]


class Call(Body):
    """A call that an earlier answer asked for."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    # the number that a call has in a stream, which some clients keep
    index: int | None = None


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, pydantic.BeforeValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None
    # other servers' names for the thoughts of an answer that a client sends back
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.tool_calls is None:
            raise ValueError("must have a 'content'")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("must have 'tool_calls' only where its role is 'assistant'")
        return self

    @property
    def text(self) -> str:
        """The text."""
        return self.content or ""

    @property
    def thought(self) -> str:
        """The thought before that, under whichever name it came."""
        return self.reasoning_content or self.reasoning or self.thinking or ""

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it, in which a developer speaks as the system."""
        values = self.model_dump(exclude_none=True)
        for call in values.get("tool_calls", ()):
            call.pop("index", None)
        values.setdefault("content", "")
        return values | {"role": "system" if self.role == "developer" else self.role}


class Function(Body):
    """A function that an answer may ask to call."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Strict = None


class Tool(Body):
    """A tool that an answer may ask for."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    """The function that an answer must call."""

    name: Name


class ChosenTool(Body):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: ChosenFunction


def _tool_choice(value: Any) -> Any:
    if value in ("auto", "none", "required"):
        return value
    with suppress(pydantic.ValidationError):
        return ChosenTool.model_validate(value)
    raise ValueError("must be 'auto', 'none', 'required' or an object that names a function")


class JsonSchema(Body):
    """A schema that an answer must follow; without one, any JSON will do."""

    name: Name
    description: str = ""
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "must have a 'json_schema' if its type is 'json_schema', and only then,"
            )
        return self


def checked_tools(value: Any) -> Any:
    """The tools, if they are not too large together."""
    # a template reads them whole, however little of them it writes
    if isinstance(value, list) and len(json.dumps(value)) > _MAX_TOOL_CHARACTERS:
        raise ValueError(f"must have at most {_MAX_TOOL_CHARACTERS:,} characters of JSON")
    return value


def _variables(value: Any) -> Any:
    if not isinstance(value, dict) or any(name in _RESERVED for name in value):
        raise ValueError(f"must be an object without the names {', '.join(_RESERVED)}")
    return value


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(TextRequest):
    """A request for the next answer of a conversation."""

    neutral: ClassVar[Mapping[str, Any]] = {
        **TextRequest.neutral,
        "audio": (),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "prediction": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[
        list[Annotated[Message, pydantic.BeforeValidator(_without_nothing)]],
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    chat_template_kwargs: Annotated[dict[str, Any], pydantic.BeforeValidator(_variables)] = Field(
        default_factory=dict
    )
    continue_final_message: bool = False
    enable_thinking: bool | None = None
    logprobs: bool = False
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    parallel_tool_calls: bool = True
    reasoning_budget: Annotated[int | None, Field(ge=0)] = None
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Annotated[str | ChosenTool, pydantic.BeforeValidator(_tool_choice)] = "auto"
    tools: Annotated[
        list[Tool], Field(max_length=MAX_TOOLS), pydantic.BeforeValidator(checked_tools)
    ] = Field(default_factory=list)
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None

    @property
    def variables(self) -> dict[str, Any]:
        """Further names for the chat template."""
        fields = {
            "enable_thinking": self.enable_thinking,
            "reasoning_effort": self.reasoning_effort,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        names = given | self.chat_template_kwargs
        if names.get("reasoning_effort") == "none":
            names = {"enable_thinking": False} | names
        return names

    @property
    def offered(self) -> list[Function]:
        """The functions that the answer may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    @property
    def forced(self) -> list[Function]:
        """The functions of which the answer must call one; none if it is free."""
        if isinstance(self.tool_choice, ChosenTool):
            wanted = self.tool_choice.function.name
            return [function for function in self.offered if function.name == wanted]
        return self.offered if self.tool_choice == "required" else []

    @property
    def grammar(self) -> dict[str, Any] | bool | None:
        """The JSON schema that the answer must follow; `None` if it is free."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        form = self.response_format.json_schema
        if form is None:
            return {"type": "object"}
        # llguidance knows no schema but an object
        return {} if form.json_schema in (None, True) else form.json_schema

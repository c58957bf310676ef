"""The schemas of requests' bodies, and the error of one that does not fit."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
from pydantic import Field

from ..arguments import did_you_mean
from ..files.reading import parse_json
from ..tokenizer.chat import reasoning_of
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
        unread: Names that clients add, and that change no answer whatever they hold.
        empty: Names that say nothing where they hold nothing, and are unknown otherwise.
    """

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True
    )

    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    hints: ClassVar[frozenset[str]] = HINTS
    unread: ClassVar[frozenset[str]] = frozenset()
    empty: ClassVar[frozenset[str]] = frozenset()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # as in OpenAI's interface, null is the same as nothing
        if not isinstance(value, dict):
            return value
        given = {
            name: item
            for name, item in value.items()
            if item is not None and name not in cls.unread and (item or name not in cls.empty)
        }
        # an error is built for each unknown name, and only the first one is reported
        for name in [name for name in given if name not in cls._taken_names()][1:]:
            del given[name]
        return given

    @classmethod
    @cache
    def _taken_names(cls) -> frozenset[str]:
        """The names under which its values come."""
        fields = cls.model_fields.items()
        return frozenset(name if field.alias is None else field.alias for name, field in fields)


@cache
def log_hint(hint: str) -> None:
    """Logs that a hint means nothing here, the first time that one comes."""
    _log.info("Requests have '%s', a hint for which this server has no use.", hint)


B = TypeVar("B", bound=Body)
T = TypeVar("T")
Each = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first mistake, since no other is reported."""


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
    return checked_object(kind, parsed_body(text, max_bytes))


def parsed_body(text: bytes, max_bytes: int) -> dict[str, Any]:
    """The object that a body is, whatever that holds.

    Raises:
        RequestError: It is not JSON, or no object.
    """
    try:
        value = parse_json(text, max_bytes=max_bytes, unique_keys=True)
    except ValueError as error:
        raise RequestError(f"[request] the body {error}.") from error
    if not isinstance(value, dict):
        raise RequestError(f"[request] the body must be a JSON object but is {_shown(value)}.")
    return value


def checked_object(kind: type[B], value: Mapping[str, Any]) -> B:
    """The request that an object makes, as `checked_body` does."""
    known = {name: item for name, item in value.items() if item is not None}
    for name, allowed in kind.neutral.items():
        if name in known and not _is_one_of(known.pop(name), allowed):
            raise _unsupported(name, allowed)
    for name in value:
        if name in kind.hints:
            log_hint(name)
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
    return any(
        value == other and isinstance(value, bool) is isinstance(other, bool) for other in allowed
    )


def _unsupported(name: str, allowed: Sequence[Any]) -> RequestError:
    values = "".join(f" or be {_shown(value)}" for value in allowed)
    return RequestError(
        f"[request] this server does not support '{name}'. It must be left out{values}.",
        param=name,
        code="unsupported_parameter",
    )


def _unknown(name: str, known: Iterable[str] = ()) -> RequestError:
    name = name[:_LONGEST_NAME]
    meant = did_you_mean(name, list(known))
    return RequestError(
        f"[request] {name!r} must be left out, since this server does not know it.{meant}",
        param=name,
        code="unknown_parameter",
    )


def _refusal(error: pydantic.ValidationError) -> RequestError:
    """The first mistake, by the name of the parameter."""
    first = error.errors(include_url=False)[0]
    name = _parameter_name(first["loc"])
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


def _parameter_name(location: tuple[int | str, ...]) -> str:
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
    if isinstance(value, str):
        value = value[:_MAX_SHOWN]
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


def number(low: float, high: float, *, above: bool = False) -> pydantic.BeforeValidator:
    """Takes a number of a range; with `above`, the lower bound is no part of it."""
    bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"

    def check(value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise ValueError(f"must be a number {bounds}")
        return float(value)

    return pydantic.BeforeValidator(check)


def whole(
    low: int, high: int | None = None, *, none: int | None = None, same: int | None = None
) -> pydantic.BeforeValidator:
    """Takes a whole number of a range, which may be written as 20.0.

    Args:
        low, high: The range; without `high`, all numbers from `low` on.
        none: A number that means that none is given.
        same: What such a number is the same as, if it is a number.
    """
    bounds = f"of at least {low:,}" if high is None else f"from {low:,} to {high:,}"

    def check(value: Any) -> Any:
        found = _as_whole(value)
        if found is not None and found == none:
            return same
        if found is None or found < low or (high is not None and found > high):
            raise ValueError(f"must be a whole number {bounds}")
        return found

    return pydantic.BeforeValidator(check)


def _as_whole(value: Any) -> int | None:
    """The whole number that a value is, however JSON writes it; `None` if it is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


Tokens = Annotated[int | None, whole(1, none=-1)]
"""A limit of tokens; -1 is none, as other servers read it."""
TopK = Annotated[int | None, whole(0, 1_000_000, none=-1, same=0)]
TopP = Annotated[float | None, number(0, 1)]


User = Annotated[str, Field(max_length=64)]
"""Whom a request is for; it stands in the log."""


class TextRequest(Body):
    """A request for texts, of either format."""

    neutral: ClassVar[Mapping[str, Any]] = {"store": (False,)}

    model: str | None = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: Annotated[float | None, number(0, 10, above=True)] = None
    repetition_context_size: Annotated[int | None, whole(1, 4096)] = None
    logit_bias: Annotated[
        dict[int, Annotated[float, number(-100, 100)]], pydantic.BeforeValidator(_biases)
    ] = Field(default_factory=dict)
    max_tokens: Tokens = None
    min_p: Annotated[float | None, number(0, 1)] = None
    min_tokens_to_keep: Annotated[int | None, whole(1, 1000)] = None
    n: Annotated[int, whole(1, 128)] = 1
    seed: Annotated[int | None, whole(-_INT64, 2 * _INT64 - 1)] = None
    stop: Annotated[list[str], pydantic.BeforeValidator(stop_strings)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    temperature: Annotated[float | None, number(0, 2)] = None
    top_k: TopK = None
    top_p: TopP = None
    xtc_probability: Annotated[float | None, number(0, 1)] = None
    xtc_threshold: Annotated[float | None, number(0, 0.5)] = None
    user: User = ""


Prompts = list[str] | list[list[int]]


def prompts(value: Any) -> Any:
    """One prompt or several, each a text or a list of token ids, as a list of prompts."""
    if isinstance(value, str) or (value and _ids(value) is not None):
        value = [value]
    found = value if isinstance(value, list) else []
    if not all(isinstance(text, str) for text in found):
        found = [ids for each in found if (ids := _ids(each)) is not None]
    if not found or len(found) < len(value):
        raise ValueError("must be a text, a list of token ids, or a list of one of them")
    if not all(found):
        raise ValueError("must hold no empty prompt")
    return found


def _ids(value: Any) -> list[int] | None:
    """A list of token ids; `None` if the value is none."""
    if not isinstance(value, list):
        return None
    ids = [number for each in value if (number := _as_whole(each)) is not None]
    return ids if len(ids) == len(value) else None


class CompletionRequest(TextRequest):
    """A request to continue prompts."""

    neutral: ClassVar[Mapping[str, Any]] = {
        **TextRequest.neutral,
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Annotated[Prompts, pydantic.PlainValidator(prompts)]
    logprobs: Annotated[int | None, whole(0, MAX_TOP_LOGPROBS)] = None


class EmbeddingRequest(Body):
    """A request for the embeddings of texts."""

    input: Annotated[Prompts, pydantic.PlainValidator(prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, whole(1)] = None
    prompt_name: str | None = None
    user: User = ""


MAX_MESSAGES = 10_000
MAX_TOOLS, _MAX_TOOL_CHARACTERS = 128, 1_000_000
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "tokenize", "self")
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Strict = bool | None
"""True if calls must follow their schema to the letter; otherwise it tells the model what to write."""


def in_lines(texts: Iterable[str]) -> str:
    """The texts as one, with a line break between two that would run into each other."""
    whole: list[str] = []
    for text in filter(None, texts):
        whole += ["\n", text] if whole and not whole[-1][-1].isspace() else [text]
    return "".join(whole)


HINT = "describe it as text, or leave it out"


def _texts(value: Any) -> list[str]:
    """The texts of a message, which may come in parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a text or a list of parts of type 'text'")
    return [_text_of(part) for part in value]


def _text_of(part: Any) -> str:
    names = {"text": "text", "refusal": "refusal"}
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in names:
        raise ValueError(
            "must be a text or a list of parts of type 'text', the only one read here (models here read "
            f"no pictures and no files: {HINT}),"
        )
    text, others = part.get(names[kind]), part.keys() - {"type", names[kind], *_UNREAD}
    if not isinstance(text, str) or others:
        raise ValueError(f"must have parts of type {kind!r} with a {names[kind]!r} and no more")
    return text


_LONGEST_LABEL = 80


def result_text(value: Any) -> Any:
    """The text of a tool's result, of any interface. What is no text becomes a line that says so."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("must be a text or a list of parts")
    return "\n".join(map(_result_line, value))


def _result_line(part: dict[str, Any]) -> str:
    if isinstance(text := part.get("text"), str):
        return text
    kind = str(part.get("type", "part"))
    is_picture = "image" in kind
    label = "" if is_picture else _label(part)
    what = (
        "picture" if is_picture else "document" if kind in _DOCUMENTS else f"part of type {kind!r}"
    )
    return f"[A {what[:_LONGEST_LABEL]}{label} was left out: this model reads text alone.]"


_DOCUMENTS = ("document", "file", "input_file")


def _label(part: dict[str, Any]) -> str:
    """The name of a document, if it has one."""
    file = part["file"] if isinstance(part.get("file"), dict) else part
    name = file.get("filename") or file.get("title")
    return f" {' '.join(name.split())[:_LONGEST_LABEL]!r}" if isinstance(name, str) else ""


Arguments = dict[str, Any] | str
"""The arguments of an earlier call; a text, as it came, where that is no JSON object."""


def call_arguments(value: Any) -> Arguments:
    """The arguments of an earlier call. Broken ones stay as they came, so that no loop ends by them."""
    if isinstance(value, dict):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        parsed = parse_json(text.encode("utf-8", "surrogatepass")) if text.strip() else None
    except ValueError:
        return text
    if parsed is None:
        return {}
    return parsed if isinstance(parsed, dict) else text


_UNREAD = frozenset({"cache_control", "provider_specific_fields"})
"""Names that clients add to any part of a chat, and that change no answer."""


def _reasoning_text(value: Any) -> Any:
    """The text of reasoning that comes as a list of blocks."""
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        return value
    texts = (block.get("thinking") or block.get("text") for block in value)
    return "".join(text for text in texts if isinstance(text, str))


class CalledFunction(Body):
    """The call that an answer asked for."""

    unread: ClassVar[frozenset[str]] = _UNREAD | {"parsed_arguments"}

    name: str
    arguments: Annotated[Arguments, pydantic.PlainValidator(call_arguments)] = Field(
        default_factory=dict
    )


class Call(Body):
    """A call that an earlier answer asked for."""

    # the index is the call's in a stream, which some clients store
    unread: ClassVar[frozenset[str]] = _UNREAD | {"index"}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One message of a conversation."""

    unread: ClassVar[frozenset[str]] = _UNREAD | {"annotations", "parsed"}
    empty: ClassVar[frozenset[str]] = frozenset({"audio", "function_call", "images", "tool_calls"})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    refusal: str = ""
    name: str | None = None
    reasoning_content: str | None = None
    # other servers' keys for the reasoning of an answer that a client sends back
    thinking: str | None = None
    reasoning: str | None = None
    thinking_blocks: Annotated[str, pydantic.BeforeValidator(_reasoning_text)] = ""
    reasoning_details: Annotated[str, pydantic.BeforeValidator(_reasoning_text)] = ""
    tool_calls: Each[Call] | None = None
    tool_call_id: str | None = None

    @pydantic.field_validator("content", mode="before")
    @classmethod
    def _read_content(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        role = info.data.get("role")
        if role == "tool":
            return result_text(value)
        return "".join(_texts(value)) if role == "assistant" else in_lines(_texts(value))

    @pydantic.model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("must have a 'content'")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("must have 'tool_calls' only where its role is 'assistant'")
        return self

    @property
    def text(self) -> str:
        """The text."""
        return (self.content or "") + self.refusal

    @property
    def reasoning_text(self) -> str:
        """The reasoning before that, under whichever key it came."""
        given = (reasoning_of(vars(self)), self.thinking_blocks, self.reasoning_details)
        return next(filter(None, given), "")


class Function(Body):
    """A function that an answer may ask to call."""

    unread: ClassVar[frozenset[str]] = _UNREAD

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Strict = None


class Tool(Body):
    """A tool that an answer may ask for."""

    unread: ClassVar[frozenset[str]] = _UNREAD

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
    """The format of an answer."""

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


def _with_pictures_of_results(value: Any) -> Any:
    """Messages in which pictures of tools' results are lines that say so.

    OpenAI's own chats have no pictures in results, so clients such as litellm move them into a message
    of the user that follows.
    """
    if not isinstance(value, list):
        return value
    found, follows = [], False
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        parts = message.get("content") if follows and role == "user" else None
        if isinstance(parts, list):
            message = {**message, "content": [_reported(part) for part in parts]}
        found.append(message)
        follows = role == "tool" or (follows and role == "user")
    return found


def _reported(part: Any) -> Any:
    is_file = isinstance(part, dict) and part.get("type") in ("image_url", "file")
    return {"type": "text", "text": _result_line(part)} if is_file else part


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
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[
        Each[Message],
        Field(min_length=1, max_length=MAX_MESSAGES),
        pydantic.BeforeValidator(_with_pictures_of_results),
    ]
    chat_template_kwargs: Annotated[dict[str, Any], pydantic.BeforeValidator(_variables)] = Field(
        default_factory=dict
    )
    continue_final_message: bool = False
    enable_thinking: bool | None = None
    logprobs: bool = False
    max_completion_tokens: Tokens = None
    parallel_tool_calls: bool = True
    reasoning_budget: Annotated[int | None, whole(0)] = None
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Annotated[str | ChosenTool, pydantic.BeforeValidator(_tool_choice)] = "auto"
    tools: Annotated[
        Each[Tool], Field(max_length=MAX_TOOLS), pydantic.BeforeValidator(checked_tools)
    ] = Field(default_factory=list)
    top_logprobs: Annotated[int | None, whole(0, MAX_TOP_LOGPROBS)] = None
    _origins: Sequence[str] = pydantic.PrivateAttr(default=())

    def from_origins(self, origins: Sequence[str]) -> "ChatRequest":
        """The same request, which knows by which names another interface has its messages."""
        self._origins = origins
        return self

    def origin(self, number: int) -> str:
        """The name of a message in the request that it came in."""
        return self._origins[number] if self._origins else f"messages[{number}]"

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
            # templates know it by this name
            del names["reasoning_effort"]
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
        format = self.response_format.json_schema
        if format is None:
            return {"type": "object"}
        # llguidance knows no schema but an object
        return {} if format.json_schema in (None, True) else format.json_schema

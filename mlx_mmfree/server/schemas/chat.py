"""The body of `/v1/chat/completions`."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...files.reading import parse_json
from .checking import Body
from .sampling import MAX_TOP_LOGPROBS, TextRequest

_MAX_MESSAGES = 10_000
_MAX_TOOLS, _MAX_TOOL_CHARACTERS = 128, 1_000_000
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "tokenize", "self")
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


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


def _arguments(value: Any) -> Any:
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
    return {
        name: item
        for name, item in value.items()
        if item is not None and not (name in empty and item == [])
    }


class CalledFunction(Body):
    """What an answer asked to call."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


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
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None
    # other servers' names for the thoughts of an answer that a client sends back
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.tool_calls is None:
            raise ValueError("must have a 'content'")
        if self.tool_calls is not None and self.role != "assistant":
            raise ValueError("must have 'tool_calls' only where its role is 'assistant'")
        return self

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
    strict: Literal[False] | None = None


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


def _choice(value: Any) -> Any:
    if isinstance(value, dict) or value in ("auto", "none", "required"):
        return value
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

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "must have a 'json_schema' if its type is 'json_schema', and only then,"
            )
        return self


def _tools(value: Any) -> Any:
    # a template reads them whole, however little of them it writes
    if isinstance(value, list) and len(json.dumps(value)) > _MAX_TOOL_CHARACTERS:
        raise ValueError(f"must have at most {_MAX_TOOL_CHARACTERS:,} characters of JSON")
    return value


def _variables(value: Any) -> Any:
    if not isinstance(value, dict) or any(name in _RESERVED for name in value):
        raise ValueError(f"must be an object without the names {', '.join(_RESERVED)}")
    return value


class ChatRequest(TextRequest):
    """A request for the next answer of a conversation."""

    neutral: ClassVar[Mapping[str, Any]] = {
        **TextRequest.neutral,
        "audio": (),
        "function_call": (),
        "functions": (),
        "metadata": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "safety_identifier": (),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[
        list[Annotated[Message, BeforeValidator(_without_nothing)]],
        Field(min_length=1, max_length=_MAX_MESSAGES),
    ]
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_variables)] = Field(
        default_factory=dict
    )
    logprobs: bool = False
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    tool_choice: Annotated[str | ChosenTool, BeforeValidator(_choice)] = "auto"
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS), BeforeValidator(_tools)] = Field(
        default_factory=list
    )
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None

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

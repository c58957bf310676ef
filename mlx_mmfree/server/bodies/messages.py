"""The bodies of Anthropic's interface."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .. import schemas
from ..turns import Tagged, Turns


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ContentBlock(Tagged):
    """A part of a message."""

    kinds: ClassVar[Mapping[str, str]] = {
        "text": "text cache_control? citations?",
        "thinking": "thinking signature? cache_control?",
        "redacted_thinking": "data",
        "tool_use": "id name input? cache_control? caller?",
        "tool_result": "tool_use_id content? is_error? cache_control?",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "image": f"models here read no pictures: {schemas.HINT}",
        "document": f"models here read no documents but text: {schemas.HINT}",
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
    input: Any = None
    tool_use_id: str = ""
    content: Annotated[str, BeforeValidator(schemas.result_text)] = ""
    is_error: bool = False
    # what changes no answer
    cache_control: Any = None
    citations: Any = None
    caller: Any = None


Content = Annotated[schemas.Each[ContentBlock], BeforeValidator(_blocks)]
_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class ChangedOutput(schemas.Body):
    """The effort from an instruction on."""

    effort: Effort | None = None


class Message(schemas.Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content
    output_config: ChangedOutput = ChangedOutput()

    @model_validator(mode="after")
    def _has_its_blocks(self) -> "Message":
        if self.output_config.effort is not None and self.role != "system":
            raise ValueError("must have an 'output_config' only where its role is 'system'")
        for block in self.content:
            if block.type not in _ALLOWED[self.role]:
                raise ValueError(f"must have no {block.type!r} where its role is {self.role!r}")
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
                    turns.result(block.tool_use_id, block.content)


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
    """True if an answer begins with reasoning, and how long that may be."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int | None, schemas.whole(1)] = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(schemas.Body):
    """A schema that an answer must follow."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(schemas.Body):
    """The effort and the format of an answer."""

    effort: Effort | None = None
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
        schemas.Each[Message],
        Field(min_length=1, max_length=schemas.MAX_MESSAGES),
        AfterValidator(_ends_with_a_question),
    ]
    system: Annotated[Content, AfterValidator(_is_text)] = Field(default_factory=list)
    tools: Annotated[
        schemas.Each[Tool],
        Field(max_length=schemas.MAX_TOOLS),
        BeforeValidator(schemas.checked_tools),
    ] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def as_chat(self) -> schemas.ChatRequest:
        """The request that it makes.

        Raises:
            RequestError: It asks for what no chat can.
        """
        turns = Turns().at("system")
        for block in self.system:
            turns.instruct(block.text)
        for number, message in enumerate(self.messages):
            message.add_to(turns.at(f"messages[{number}]"))
        values = self._values() | {"messages": turns.messages}
        return schemas.checked(schemas.ChatRequest, values).from_origins(turns.origins)

    def _values(self) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            variables["enable_thinking"] = self.thinking.type == "enabled"
        changed = (message.output_config.effort for message in reversed(self.messages))
        if (effort := next(filter(None, changed), self.output_config.effort)) is not None:
            variables["reasoning_effort"] = effort
        values: dict[str, Any] = {
            "model": self.model,
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
        if (format := self.output_config.format) is not None:
            schema = {"name": "answer", "schema": format.json_schema}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        return values


class MessagesRequest(CountRequest):
    """A request for the next answer of a conversation."""

    max_tokens: Annotated[int, schemas.whole(1)]
    stop_sequences: Annotated[list[str], BeforeValidator(schemas.stop_strings)] = Field(
        default_factory=list
    )
    stream: bool = False
    temperature: Annotated[float | None, schemas.number(0, 1)] = None
    top_k: schemas.TopK = None
    top_p: schemas.TopP = None

    def _values(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        own = {name: getattr(self, name) for name in names}
        return super()._values() | own | {"stop": self.stop_sequences}

"""The tools of `/v1/responses` that run at the client: each is a function for the model."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from .. import schemas
from ..errors import RequestError

_log = logging.getLogger(__name__)
_LONGEST_NAME = 128


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}


def _parsed(text: str) -> dict[str, Any]:
    """The arguments that a model has written; none where they are not whole."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _input(text: str) -> str:
    """The input of a custom tool, also where a model has named it otherwise."""
    arguments = _parsed(text)
    values = [arguments["input"]] if "input" in arguments else list(arguments.values())
    is_text = len(values) == 1 and isinstance(values[0], str)
    return values[0] if is_text else text if values else ""


@dataclass(frozen=True)
class Kind:
    """How a kind of tool is called, in items and by the model.

    Attributes:
        item: The type of the item that is a call.
        prefix: What the ids of such items begin with.
        key: The name in the item under which the arguments stand.
        shown: The arguments as the item has them, from the text that the model wrote.
        read: The arguments as the model wrote them, from the arguments of the item.
        name: The name of the function for the model, of a tool that has none of its own.
        description: The function's description, of a tool that has none of its own.
        parameters: The function's parameters, likewise.
    """

    item: str
    prefix: str
    key: str
    shown: Callable[[str], Any]
    read: Callable[[Any], Any] = lambda value: value
    name: str = ""
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


def _without_type(value: Any) -> Any:
    """The action of a call without what says nothing, as the model wrote it."""
    if not isinstance(value, dict):
        return value
    return {
        name: each
        for name, each in value.items()
        if name != "type" and each is not None and each != {}
    }


KINDS: Mapping[str, Kind] = {
    "function": Kind("function_call", "fc", "arguments", str),
    "custom": Kind(
        "custom_tool_call",
        "ctc",
        "input",
        _input,
        lambda value: {"input": value},
        parameters=_object("input", input=_TEXT),
    ),
    "local_shell": Kind(
        "local_shell_call",
        "lsh",
        "action",
        lambda text: {"type": "exec", "env": {}} | _parsed(text),
        _without_type,
        "local_shell",
        "Runs a command at the user's machine.",
        _object(
            "command",
            command=_TEXTS,
            working_directory=_TEXT,
            timeout_ms=_NUMBER,
            env={"type": "object", "additionalProperties": _TEXT},
        ),
    ),
    "shell": Kind(
        "shell_call",
        "sh",
        "action",
        lambda text: {"timeout_ms": None, "max_output_length": None} | _parsed(text),
        _without_type,
        "shell",
        "Runs shell commands at the user's machine, one after the other.",
        _object("commands", commands=_TEXTS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
    ),
    "apply_patch": Kind(
        "apply_patch_call",
        "apc",
        "operation",
        _parsed,
        name="apply_patch",
        description="Creates, updates or deletes a file. The diff is a unified one.",
        parameters=_object(
            "type path",
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path=_TEXT,
            diff=_TEXT,
        ),
    ),
}
CALLS = {kind.item: kind for kind in KINDS.values()}
"""The kinds by the types of items that are their calls."""


def full_name(name: str, namespace: str | None) -> str:
    """The name of a tool for the model, which knows no namespaces."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class ClientTool(schemas.Body):
    """A tool that runs at the client, or a namespace of such tools.

    Attributes:
        fields: The names that each type has beside its own.
    """

    unread: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "async", "cache_control", "defer_loading", "output_schema"}
    )

    type: Literal["function", "custom", "namespace", "local_shell", "shell", "apply_patch"]
    name: schemas.Name | None = None
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: schemas.Strict = None
    format: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    tools: list["ClientTool"] = Field(default_factory=list)

    fields: ClassVar[Mapping[str, str]] = {
        "function": "name description parameters strict",
        "custom": "name description format",
        "namespace": "name description tools",
        "shell": "environment",
    }

    @model_validator(mode="after")
    def _has_its_fields(self) -> "ClientTool":
        known = self.fields.get(self.type, "").split()
        for name in self.model_fields_set - {"type", *known}:
            raise ValueError(f"must not have {name!r} where its type is {self.type!r}")
        if "name" in known and self.name is None:
            raise ValueError(f"must have a 'name' where its type is {self.type!r}")
        for tool in self.tools:
            if tool.type not in ("function", "custom"):
                raise ValueError(
                    f"must have functions and custom tools alone but has {tool.type!r}"
                )
        return self

    def shown(self) -> dict[str, Any]:
        """The tool as a response shows it."""
        if self.type == "function":
            return self.model_dump(include={"type", "name", "description", "parameters", "strict"})
        shown = self.model_dump(exclude_unset=True, exclude={"tools"})
        return shown | ({"tools": [each.shown() for each in self.tools]} if self.tools else {})


@dataclass(frozen=True)
class Offered:
    """A tool as the model knows it.

    Attributes:
        tool: The tool.
        namespace: The namespace in which it stands, and what that says of itself.
    """

    tool: ClientTool
    namespace: str | None = None
    about: str = ""

    @property
    def kind(self) -> Kind:
        return KINDS[self.tool.type]

    @property
    def name(self) -> str:
        """Its name for the model."""
        return full_name(self.tool.name or self.kind.name, self.namespace)

    @property
    def named(self) -> dict[str, str]:
        """Its name in the item of a call, with the name of its namespace apart."""
        names = {"name": self.tool.name, "namespace": self.namespace}
        return {key: name for key, name in names.items() if name}

    def function(self) -> dict[str, Any]:
        """The function that it is for the model."""
        tool, kind = self.tool, self.kind
        described = [self.about, tool.description or kind.description]
        if definition := tool.format.get("definition"):
            described.append(f"The input follows this grammar:\n{definition}")
        is_function = tool.type == "function"
        function = {
            "name": self.name,
            "description": schemas.in_lines(described),
            "parameters": tool.parameters if is_function else dict(kind.parameters),
            # what the client runs must have the format that it knows
            "strict": tool.strict if is_function else (True if kind.name else None),
        }
        return {"type": "function", "function": function}


def chosen(choice: Any, tools: Mapping[str, Offered]) -> Any:
    """The choice of a tool as chats have it. A tool in a namespace may be named without it."""
    if not isinstance(choice, dict):
        return choice
    called = choice["called"]
    if called not in tools:
        same = [name for name, each in tools.items() if each.tool.name == choice.get("name")]
        called = same[0] if len(same) == 1 else called
    return {"type": "function", "function": {"name": called}}


def offered(tools: list[ClientTool]) -> dict[str, Offered]:
    """The tools by their names for the model, those in namespaces too.

    Raises:
        RequestError: One cannot be offered: it has no name of its own, or one that is too long.
    """
    found: dict[str, Offered] = {}
    for number, each in enumerate(_each(tools)):
        if len(each.name) > _LONGEST_NAME or each.name in found:
            rule = (
                "must have a name of its own"
                if each.name in found
                else f"must have at most {_LONGEST_NAME} characters with its namespace in its name"
            )
            raise RequestError(
                f"[request] 'tools' {rule}, but number {number + 1} is {each.name!r:.300}.",
                param="tools",
            )
        found[each.name] = each
    return found


def _each(tools: list[ClientTool]) -> Iterator[Offered]:
    for tool in tools:
        if tool.type != "namespace":
            yield Offered(tool)
        for inner in tool.tools:
            yield Offered(inner, tool.name, tool.description)


_HOSTED = frozenset(
    {
        *("code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "mcp", "tool_search", "web_search", "web_search_2025_08_26"),
        "web_search_preview",
    }
)


@cache
def left_out(kind: str) -> None:
    """Logs that models do not see tools of a kind, the first time that one comes."""
    _log.info("Requests offer tools of type '%s', which models here do not see.", kind)


def client_tools(value: Any) -> Any:
    """The tools that run at the client. Agents name others too, which no model here can call."""
    schemas.checked_tools(value)
    if not isinstance(value, list):
        return value
    own = []
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        is_hosted = isinstance(kind, str) and kind in _HOSTED
        if is_hosted or (kind == "shell" and _runs_at_openai(tool)):
            left_out(kind)
        else:
            own.append(tool)
    if value and not own:
        raise ValueError("must have a tool that runs at the client, since this server runs none,")
    return own


def _runs_at_openai(tool: Mapping[str, Any]) -> bool:
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") != "local"


def tool_choice(value: Any) -> Any:
    """The choice of a tool, which also knows how the model calls it."""
    if value in ("auto", "none", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    named = KINDS[kind] if isinstance(kind, str) and kind in KINDS else None
    if named is not None:
        known = {"type"} if named.name else {"type", "name", "namespace"}
        name, namespace = value.get("name") or named.name, value.get("namespace") or ""
        is_named = isinstance(name, str) and isinstance(namespace, str)
        if is_named and name and value.keys() <= known:
            return value | {"called": full_name(name, namespace)}
    raise ValueError("must be 'auto', 'none', 'required' or an object that names a tool")

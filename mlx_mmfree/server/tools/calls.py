"""Calls of tools, as models write them and as clients read them."""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...files.reading import parse_json


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: The function.
        arguments: The text of a JSON object.
        id: By which the result will name it.
    """

    name: str
    arguments: str
    id: str = field(default_factory=_new_id)

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = str | ToolCall
"""A stretch of an answer: text, or a call."""


class CallReader(Protocol):
    """Takes the text of an answer apart as it comes."""

    def add(self, text: str) -> list[Part]:
        """Takes new text and returns what is certain by now."""

    def finalize(self) -> list[Part]:
        """What was held back, once no more follows."""


def parsed_call(text: str, arguments: str) -> ToolCall | None:
    """The call in a JSON object; `None` if the text is no call.

    Args:
        text: What a model wrote.
        arguments: The key under which it writes the arguments.
    """
    try:
        value = parse_json(text.encode("utf-8"))
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    if not isinstance(given, dict):
        return None
    return ToolCall(value["name"], json.dumps(given, ensure_ascii=False))

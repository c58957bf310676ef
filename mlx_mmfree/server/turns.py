"""The common part of dialects with items and blocks: typed parts, and turns of a chat."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from .schemas import Body


class Tagged(Body):
    """A part of a request that is one of several kinds, told apart by `type`.

    Attributes:
        kinds: The names that each kind has beside its type. Those that may be left out end in `?`.
        refused: The kinds that are known and not offered, each with the reason.
    """

    kinds: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    type: str

    @model_validator(mode="before")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            return value
        if kind in cls.refused:
            raise ValueError(f"must not have the type {kind!r}, since {cls.refused[kind]},")
        if kind not in cls.kinds:
            raise ValueError(f"must have a type of {', '.join(cls.kinds)}")
        given = {name: item for name, item in value.items() if item is not None}
        names = cls.kinds[kind].split()
        for name in given.keys() - {"type", *(name.rstrip("?") for name in names)}:
            raise ValueError(f"must not have {name[:60]!r} where its type is {kind!r}")
        for name in names:
            if not name.endswith("?") and name not in given:
                raise ValueError(f"must have {name!r} where its type is {kind!r}")
        return given


class Turns:
    """Collects the messages of a chat.

    Chat templates want one message of the system, at the beginning, and turns that alternate. So all
    instructions before the first turn are one message, later ones are told as the user's, and what one
    side says in several parts is one turn.

    Attributes:
        messages: Those so far, as `ChatRequest` has them.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._functions: dict[str, str] = {}

    def instruct(self, text: str) -> None:
        """Takes an instruction."""
        has_begun = any(message["role"] != "system" for message in self.messages)
        self._add("user" if has_begun else "system", text)

    def ask(self, text: str) -> None:
        """Takes words of the user."""
        self._add("user", text)

    def result(self, call: str, text: str) -> None:
        """Takes what a tool has answered to a call."""
        message = {"role": "tool", "tool_call_id": call, "content": text}
        if call in self._functions:
            message["name"] = self._functions[call]
        self.messages.append(message)

    def say(self, text: str) -> None:
        """Takes words of an earlier answer."""
        self._answer()["content"] += text

    def think(self, text: str) -> None:
        """Takes a thought of an earlier answer."""
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def call(self, call: str, name: str, arguments: dict[str, Any]) -> None:
        """Takes a call that an earlier answer asked for."""
        self._functions[call] = name
        function = {"name": name, "arguments": arguments}
        self._answer().setdefault("tool_calls", []).append({"id": call, "function": function})

    def _answer(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _add(self, role: str, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += f"\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

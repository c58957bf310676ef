"""Shared by dialects with items and blocks: typed parts, and messages of a chat."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from .schemas import Body, in_lines


class Tagged(Body):
    """A part of a request that is one of several kinds, distinguished by `type`.

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
    """Collects the messages of a chat from the blocks or items of another interface.

    Attributes:
        origins: The name of each message in the request.
    """

    def __init__(self) -> None:
        # their texts are concatenated once, at the end, since a message may have thousands of them
        self._messages: list[dict[str, Any]] = []
        self.origins: list[str] = []
        self._origin = ""
        # which part of the request each message and the next one come from
        self._parts: list[int] = []
        self._part = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, as `ChatRequest` has them."""
        return [_with_whole_texts(message) for message in self._messages]

    def at(self, origin: str) -> "Turns":
        """The same, for what a part of the request holds."""
        self._origin = origin
        self._part += 1
        return self

    def instruct(self, text: str) -> None:
        """Takes an instruction."""
        self._add("system", text)

    def ask(self, text: str) -> None:
        """Takes words of the user."""
        self._add("user", text)

    def result(self, call: str, text: str) -> None:
        """Takes what a tool has answered to a call."""
        self._begin({"role": "tool", "tool_call_id": call, "content": [text]})

    def say(self, text: str) -> None:
        """Takes words of an earlier answer."""
        last = self._last
        answer = self._answer(is_new="tool_calls" not in last and bool(last["content"]))
        if text:
            answer["content"].append(text)

    def think(self, text: str) -> None:
        """Takes reasoning of an earlier answer."""
        if text:
            last = self._last
            answer = self._answer(is_new="tool_calls" in last or bool(last["content"]))
            answer.setdefault("reasoning_content", []).append(text)

    def call(self, call: str, name: str, arguments: Any) -> None:
        """Takes a call that an earlier answer asked for."""
        function = {"name": name, "arguments": arguments}
        calls = self._answer().setdefault("tool_calls", [])
        calls.append({"id": call, "function": function})

    @property
    def _last(self) -> dict[str, Any]:
        return self._messages[-1] if self._messages else {"role": "", "content": []}

    def _answer(self, is_new: bool = False) -> dict[str, Any]:
        """The answer that goes on, or another one; parts of one message stay together."""
        if self._last["role"] != "assistant" or (is_new and self._parts[-1] != self._part):
            self._begin({"role": "assistant", "content": []})
        return self._messages[-1]

    def _add(self, role: str, text: str) -> None:
        if self._last["role"] == role and self._parts[-1] == self._part:
            self._messages[-1]["content"].append(text)
        else:
            self._begin({"role": role, "content": [text]})

    def _begin(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self.origins.append(self._origin)
        self._parts.append(self._part)


def _with_whole_texts(message: dict[str, Any]) -> dict[str, Any]:
    join = "".join if message["role"] == "assistant" else in_lines
    names = message.keys() & {"content", "reasoning_content"}
    return message | {name: join(message[name]) for name in names}

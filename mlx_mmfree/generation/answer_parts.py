"""The parts of an answer, in the order in which they are written: thoughts, texts, calls of tools."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class ThinkingDelta:
    """Further text of a thought."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """Further text for the reader."""

    text: str


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class ToolCallStart:
    """A call of a tool begins.

    Attributes:
        name: The function.
        id: By which the result will name the call.
    """

    name: str
    id: str = field(default_factory=_new_id)


@dataclass(frozen=True)
class ToolCallDelta:
    """Further characters of the arguments, which together are the text of a JSON object."""

    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The call is complete."""


@dataclass(frozen=True)
class Finish:
    """The answer has ended.

    Attributes:
        reason: `"stop"` at the end of the answer or a stop string, `"tool_calls"` there after a call,
            `"length"` at the last token allowed.
        stop_string: The stop string that has ended it, if one has.
    """

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None = None


Part = ThinkingDelta | TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | Finish


class PartReader(Protocol):
    """Takes the text of an answer apart as it comes; `Finish` is no part that it gives."""

    def add(self, text: str) -> list[Part]:
        """Takes new text and returns what is certain by now."""

    def finalize(self) -> list[Part]:
        """The text that was held back, once no more follows."""


class TextReader:
    """Finds nothing but text."""

    def add(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finalize(self) -> list[Part]:
        return []


def whole_call(name: str, arguments: str) -> list[Part]:
    """The parts of a call that is known as a whole."""
    return [ToolCallStart(name), ToolCallDelta(arguments), ToolCallEnd()]


@dataclass
class Block:
    """A stretch of an answer of one kind.

    Attributes:
        kind: What it is.
        text: The thought, the text, or the arguments of the call, as far as it is written.
        name, id: Those of a call.
        is_complete: Whether it is known to have all of its text; a call that was cut never has.
    """

    kind: Literal["thinking", "text", "tool_call"]
    text: str = ""
    name: str = ""
    id: str = ""
    is_complete: bool = False


@dataclass(frozen=True)
class Change:
    """The change of an answer's blocks by a part.

    Attributes:
        kind: The block begins, grows by `text`, or ends.
        index: The number of the block.
        block: The block.
        text: What it grows by.
    """

    kind: Literal["begin", "grow", "end"]
    index: int
    block: Block
    text: str = ""


class Blocks:
    """The blocks of an answer as they grow.

    Attributes:
        all: Those so far.
        finish: How the answer has ended; `None` where it has not.

    Example:
        >>> blocks = Blocks()
        >>> text = [TextDelta("Let me "), TextDelta("see.")]
        >>> for part in [*text, *whole_call("look", "{}"), Finish("stop")]:
        ...     print([change.kind for change in blocks.add(part)])
        ['begin', 'grow']
        ['grow']
        ['end', 'begin']
        ['grow']
        ['end']
        []
        >>> [(block.kind, block.text) for block in blocks.all], blocks.finish.reason
        ([('text', 'Let me see.'), ('tool_call', '{}')], 'tool_calls')
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish: Finish | None = None
        self._is_open = False

    def text(self, kind: Literal["thinking", "text"]) -> str:
        """All thoughts, or all texts, as one."""
        return "".join(block.text for block in self.all if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        """The calls of tools."""
        return [block for block in self.all if block.kind == "tool_call"]

    def add(self, part: Part) -> list[Change]:
        """Takes a part and returns what it changes."""
        return list(self._add(part))

    def _add(self, part: Part) -> Iterator[Change]:
        match part:
            case ThinkingDelta(text):
                yield from self._grow("thinking", text)
            case TextDelta(text):
                yield from self._grow("text", text)
            case ToolCallStart(name, id):
                yield from self._begin(Block("tool_call", name=name, id=id))
            case ToolCallDelta(text):
                yield from self._grow("tool_call", text)
            case ToolCallEnd():
                self.all[-1].is_complete = True
                yield from self._end()
            case Finish(reason, stop_string):
                yield from self._end()
                has_called = reason == "stop" and bool(self.calls)
                self.finish = Finish("tool_calls" if has_called else reason, stop_string)

    def _grow(self, kind: Literal["thinking", "text", "tool_call"], text: str) -> Iterator[Change]:
        if not self._is_open or self.all[-1].kind != kind:
            yield from self._begin(Block(kind))
        block = self.all[-1]
        block.text += text
        yield Change("grow", len(self.all) - 1, block, text)

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self.all.append(block)
        self._is_open = True
        yield Change("begin", len(self.all) - 1, block)

    def _end(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            self.all[-1].is_complete |= self.all[-1].kind != "tool_call"
            yield Change("end", len(self.all) - 1, self.all[-1])

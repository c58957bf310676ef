"""The parts of an answer, in the order in which they are written: reasoning, texts, calls of tools."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol


@dataclass(frozen=True)
class ThinkingDelta:
    """Further text of reasoning."""

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
        reason: `"stop"` at the end of the answer or a stop string, `"length"` at the last token
            allowed.
        stop_string: The stop string that has ended it, if one has.
    """

    reason: Literal["stop", "length"]
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


Kind = Literal["thinking", "text", "tool_call"]


@dataclass(frozen=True)
class Block:
    """A stretch of an answer of one kind.

    Attributes:
        kind: What it is.
        text: The reasoning, the text, or the arguments of the call.
        name: The function of a call.
        id: The id of a call.
        is_complete: Whether all of it is there; a call that breaks off never is complete.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    id: str = ""
    is_complete: bool = False


@dataclass(frozen=True)
class Change:
    """The change of an answer's blocks by a part.

    Attributes:
        kind: The block begins, grows or ends. A call that breaks off never ends.
        index: The number of the block.
        block: The block as it begins, without text, or as it ends; where it grows, its new text alone.
    """

    kind: Literal["begin", "grow", "end"]
    index: int
    block: Block


class Blocks:
    """The blocks of an answer as they grow.

    Attributes:
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
        >>> [(block.kind, block.text) for block in blocks.all], blocks.reason
        ([('text', 'Let me see.'), ('tool_call', '{}')], 'tool_calls')
    """

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self._before: list[Block] = []
        self._last: Block | None = None
        self._texts: list[str] = []

    @property
    def all(self) -> list[Block]:
        """All blocks so far."""
        last = [] if self._last is None else [self._grown(self._last)]
        return [*self._before, *last]

    @property
    def whole(self) -> list[Block]:
        """The blocks of a whole answer, without a call that broke off."""
        return [block for block in self.all if block.is_complete]

    @property
    def calls(self) -> list[Block]:
        """The calls of tools so far."""
        return [block for block in self.all if block.kind == "tool_call"]

    @property
    def reason(self) -> Literal["stop", "length", "tool_calls"] | None:
        """Why the answer has ended: `"tool_calls"` if and only if a call is complete."""
        if self.finish is None:
            return None
        has_called = any(call.is_complete for call in self.calls)
        return "tool_calls" if has_called else self.finish.reason

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
                yield from self._end(is_complete=True)
            case Finish(reason, stop_string):
                yield from self._end()
                self.finish = Finish(reason, stop_string)

    def _grow(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._last is None or self._last.kind != kind:
            yield from self._begin(Block(kind))
        assert self._last is not None
        self._texts.append(text)
        yield Change("grow", len(self._before), replace(self._last, text=text))

    def _begin(self, block: Block) -> Iterator[Change]:
        yield from self._end()
        self._last = block
        yield Change("begin", len(self._before), block)

    def _end(self, is_complete: bool = False) -> Iterator[Change]:
        if self._last is None:
            return
        is_complete |= self._last.kind != "tool_call"
        block = replace(self._grown(self._last), is_complete=is_complete)
        self._before.append(block)
        self._last, self._texts = None, []
        if is_complete:
            yield Change("end", len(self._before) - 1, block)

    def _grown(self, block: Block) -> Block:
        return replace(block, text="".join(self._texts))

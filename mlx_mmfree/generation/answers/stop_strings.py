"""Strings that end a text."""

from collections.abc import Sequence
from typing import Protocol


class TextEnd(Protocol):
    """Ends a text amid a token, or after one.

    Attributes:
        met: The stop string that has ended the text, if one has.
        is_met: Whether the text has ended.
        holds_back: Whether there is text that more text decides on.
    """

    @property
    def met(self) -> str | None: ...
    @property
    def is_met(self) -> bool: ...
    @property
    def holds_back(self) -> bool: ...

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""

    def finalize(self) -> str:
        """The text held back, once no more follows."""


class StopStrings:
    """Ends a text before the first of some strings; no part of it is ever shown.

    Text that could be a prefix of a stop string is held back until more text decides.

    Args:
        strings: The stop strings; none is empty.

    Attributes:
        met: The one that has ended the text; `None` where none has.

    Raises:
        ValueError: A string is empty.

    Example:
        >>> stop = StopStrings(["END"])
        >>> stop.add("the E"), stop.add("ND of it"), stop.is_met
        ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            strings = [strings]
        if "" in strings:
            raise ValueError("[StopStrings] 'stop' must not hold an empty string.")
        self._strings = tuple(strings)
        self._pending = ""
        self.met: str | None = None

    @property
    def is_met(self) -> bool:
        """True if one of the strings has ended the text."""
        return self.met is not None

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""
        text = self._pending + text
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            _, start, self.met = min(found)
            self._pending = ""
            return text[:start]
        cut = len(text) - max((overlap(text, s) for s in self._strings), default=0)
        self._pending = text[cut:]
        return text[:cut]

    @property
    def holds_back(self) -> bool:
        """True if there is text that more text decides on."""
        return bool(self._pending)

    def finalize(self) -> str:
        """The text held back, once no more follows."""
        pending, self._pending = self._pending, ""
        return pending


def overlap(text: str, string: str) -> int:
    """The length of the longest proper prefix of `string` that `text` ends with."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)

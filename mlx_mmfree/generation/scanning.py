"""Takes a text apart while it comes: what is certain is passed on, and each character is read once."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import cache

from .answers.answer_parts import Part
from .answers.stop_strings import overlap

Steps = Generator[None, None, None]
LONGEST_HEAD = 512
"""Characters in which the head of something must be complete; longer ones are ordinary text."""

_OPEN = {"{": "}", "[": "]"}
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\\x00-\x1f]')


@cache
def _any_of(*tags: str) -> re.Pattern[str]:
    # without tags, what is nowhere
    return re.compile("|".join(map(re.escape, tags)) or r"(?!)")


class Scanner(ABC):
    """A `PartReader` that is written as one walk over the answer.

    The walk is a generator, which waits with `yield` wherever it needs more text than there is.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._passed = 0
        self._has_ended = False
        self._parts: list[Part] = []
        self._walk = self._steps()

    def add(self, text: str) -> list[Part]:
        """Takes new text and returns what is certain by now."""
        self._passed += self._at
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._walk, None)
        parts, self._parts = self._parts, []
        return parts

    def finalize(self) -> list[Part]:
        """The text that was held back, once no more follows."""
        self._has_ended = True
        return self.add("")

    @property
    def position(self) -> int:
        """How many characters the walk has passed."""
        return self._passed + self._at

    @abstractmethod
    def _steps(self) -> Steps:
        """Walks over the answer to its end."""

    def _taken(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        return text

    def _until(
        self, tags: Sequence[str], take: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Hands on what comes before the first of some tags, which is returned; `None` at the end."""
        pattern = _any_of(*tags)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                take(self._taken(found.start() - self._at))
                self._at = found.end()
                return found[0]
            rest = self._text[self._at :]
            withheld = (
                0 if self._has_ended else max((overlap(rest, tag) for tag in tags), default=0)
            )
            take(self._taken(len(rest) - withheld))
            if self._has_ended:
                return None
            yield

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no space, which stays; `""` at the end or after many spaces."""
        while True:
            rest = self._text[self._at : self._at + LONGEST_HEAD].lstrip()
            if rest or self._has_ended or len(self._text) - self._at >= LONGEST_HEAD:
                return rest[:1]
            yield

    def _tag(self, tag: str) -> Generator[None, None, bool]:
        """Returns whether a tag comes next, after space; it is then passed with that."""
        while True:
            rest = self._text[self._at : self._at + LONGEST_HEAD].lstrip()
            if rest.startswith(tag):
                self._at = self._text.index(tag, self._at) + len(tag)
                return True
            is_other = not tag.startswith(rest) or len(self._text) - self._at >= LONGEST_HEAD
            if is_other or self._has_ended:
                return False
            yield

    def _head(self, pattern: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """The match of a pattern that comes next, which is passed; `None` if something else comes."""
        while True:
            found = pattern.match(self._text, self._at, self._at + LONGEST_HEAD)
            # a match at the end of the text may yet grow
            is_all = self._has_ended or len(self._text) - self._at >= LONGEST_HEAD
            if found is not None and (is_all or found.end() < len(self._text)):
                self._at = found.end()
                return found
            if is_all:
                return None
            yield

    def _json(
        self, take: Callable[[str], None], closing: Sequence[str] = ()
    ) -> Generator[None, None, bool | None]:
        """Hands on a JSON object, list or string that comes next.

        Args:
            take: Takes its text, in which control characters within strings are escaped.
            closing: What closes the objects and lists that are open already.

        Returns:
            Whether it was complete; `None` if it broke off.
        """
        left = list(closing)
        is_string = False
        while True:
            start, changed, is_whole = self._at, list[str](), None
            while is_whole is None:
                found = (_INSIDE if is_string else _OUTSIDE).search(self._text, self._at)
                if found is None:
                    self._at = len(self._text)
                    break
                mark, self._at = found[0], found.end()
                if mark == "\\" and self._at == len(self._text) and not self._has_ended:
                    # what it escapes is not there yet
                    self._at -= 1
                    break
                if mark == "\\" or mark < " ":
                    self._at += mark == "\\"
                    escaped = self._text[found.start() : self._at]
                    if escaped[-1] < " ":
                        changed += [self._text[start : found.start()], json.dumps(escaped)[1:-1]]
                        start = self._at
                elif mark == '"':
                    is_string = not is_string
                    is_whole = None if is_string or left else True
                elif mark in _OPEN:
                    left.append(_OPEN[mark])
                elif not left or left.pop() != mark:
                    is_whole = False
                elif not left:
                    is_whole = True
            take("".join([*changed, self._text[start : self._at]]))
            if is_whole is not None or self._has_ended:
                return is_whole
            yield

"""Breaks lines between words in a text that arrives in pieces."""

import re
from unicodedata import category, east_asian_width

# Scripts that are written without spaces: their lines may break anywhere.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60"
    "\U00020000-\U0003fffd"
)
_PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")


def columns(text: str) -> int:
    """The number of terminal columns that a text takes."""
    return sum(
        0 if category(sign) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(sign) in "WF")
        for sign in text
    )


class WordWrap:
    """Lays out a growing text so that the terminal breaks no word in two.

    A word is held back until the character after it is known, unless it is wider than a line.

    Args:
        width: Number of columns of a line.
    """

    def __init__(self, width: int):
        self._width = max(width, 1)
        self._column = 0
        self._space = self._word = ""

    def add(self, text: str) -> str:
        """Adds a piece of the text and returns what can be shown now."""
        shown = []
        for part in _PARTS.findall(text):
            if part == "\n":
                shown += [self.finish(), part]
                self._column, self._space = 0, ""
            elif part.isspace():
                shown.append(self.finish())
                self._space += part
            elif re.match(f"[{_WIDE}]", part):
                shown.append(self.finish())
                shown.append(self._placed(part, may_break=True))
            else:
                self._word += part
                if columns(self._word) >= self._width:
                    shown.append(self.finish())
        return "".join(shown)

    def finish(self) -> str:
        """Returns the word that was held back."""
        word, self._word = self._word, ""
        return word and self._placed(word, may_break=bool(self._space))

    def _placed(self, word: str, *, may_break: bool) -> str:
        space, self._space = self._space, ""
        width = columns(word)
        column = self._column + len(space.expandtabs())
        if self._column and may_break and column + width > self._width:
            self._column = width
            return "\n" + word
        column += width
        self._column = column if column <= self._width else (column - 1) % self._width + 1
        return space + word

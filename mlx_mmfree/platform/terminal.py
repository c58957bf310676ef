"""What reaches a terminal: text, and no character that steers it.

Models, tokenizers, templates and files come from strangers, and so do the names and messages made of
them. Pipes and files get every character as it is.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# C0 but for newline and tab, DEL, C1; signs that change the direction of the text around them
_STEERING = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_SHOWN = dict.fromkeys(_STEERING, "\N{REPLACEMENT CHARACTER}")
# how progress bars go to their line and begin it again
_MOVES = re.compile("\n*(?:\x1b\\[A)*")
_LINE = re.compile(r"\A(\r?)(.*?)(\r?)\Z", re.DOTALL)


def shown(text: str) -> str:
    """The text with U+FFFD for every character that would steer a terminal.

    Each is replaced for itself, so that a sequence that comes in two parts steers nothing either.
    """
    return text.translate(_SHOWN)


def _shown_line(line: re.Match[str]) -> str:
    return line[1] + shown(line[2]) + line[3]


class _Output(io.TextIOWrapper):
    """Standard output on a terminal."""

    def write(self, text: str, /) -> int:
        super().write(shown(text))
        return len(text)


class _Errors(_Output):
    """Standard error on a terminal; progress bars, which write a line at a time, go on working."""

    def write(self, text: str, /) -> int:
        if _MOVES.fullmatch(text):
            return io.TextIOWrapper.write(self, text)
        io.TextIOWrapper.write(self, _LINE.sub(_shown_line, text, count=1))
        return len(text)


@contextmanager
def clean_terminal() -> Iterator[None]:
    """Filters what the block or function prints, where standard output or standard error is a terminal.

    After an exception the filter stays, for the traceback that follows.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = _filtered(sys.stdout, _Output)
    sys.stderr = _filtered(sys.stderr, _Errors)
    yield
    filtered = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = before
    for stream in filtered:
        if isinstance(stream, _Output):
            stream.flush()


def _filtered(stream: TextIO, kind: type[_Output]) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, _Output):
        return stream
    if stream.closed or not stream.isatty():
        return stream
    stream.flush()
    # another way to the same terminal, which stays open when this one goes
    binary = os.fdopen(stream.fileno(), "wb", closefd=False)
    return kind(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)

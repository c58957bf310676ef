"""Keeps control characters from reaching a terminal.

Models, tokenizers, templates and files come from strangers, and so do the names and messages made of
them. Pipes and files get every character as it is, except in errors of the library.
"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ..errors import shown

# how progress bars move to their line
_MOVES = re.compile("\n*(?:\x1b\\[A)*")
_LINE = re.compile(r"\A(\r?)(.*?)(\r?)\Z", re.DOTALL)


def _shown_line(line: re.Match[str]) -> str:
    return line[1] + shown(line[2]) + line[3]


class _Output(io.TextIOWrapper):
    """Standard output on a terminal."""

    def write(self, text: str, /) -> int:
        super().write(shown(text))
        return len(text)


class _Errors(_Output):
    """Standard error on a terminal. Progress bars, which write one line at a time, still work."""

    def write(self, text: str, /) -> int:
        if _MOVES.fullmatch(text):
            return io.TextIOWrapper.write(self, text)
        io.TextIOWrapper.write(self, _LINE.sub(_shown_line, text, count=1))
        return len(text)


@contextmanager
def clean_terminal() -> Iterator[None]:
    """Filters what the block or function prints to a terminal, on standard output and standard error.

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
    # a second stream to the same terminal, which stays open when this stream is closed
    binary = os.fdopen(stream.fileno(), "wb", closefd=False)
    return kind(binary, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def counted(count: int, unit: str) -> str:
    """A number of things as text, such as "1 step" or "2 steps"."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"

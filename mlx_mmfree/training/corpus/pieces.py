"""Reads files, plain or compressed, piece by piece, so that their size does not matter."""

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...files.reading import open_file

OnBytes = Callable[[int], object]
"""Is told how many more bytes of a file, as it lies on the disk, have been read."""

# text compresses to about a third of its size, and repeated lines to less
_MOST_TIMES_LARGER = 100
_SMALL_BYTES = 1_000_000
_PIECE_BYTES = 1_000_000

_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".xz": lzma.open,
}
COMPRESSED = tuple(_UNPACKERS)
"""The suffixes of compressed files."""


class Growth:
    """Refuses a file that holds far more text than it has bytes.

    Args:
        path: The file.
        kind: What it must hold, for the message.
        size_bytes: Its size on the disk.
    """

    def __init__(self, path: Path, kind: str, size_bytes: int):
        self._path, self._kind = path, kind
        self._most = self._left = _SMALL_BYTES + _MOST_TIMES_LARGER * size_bytes

    def add(self, size_bytes: int) -> None:
        """Tells of so many further bytes of text.

        Raises:
            TrainingError: They are too many.
        """
        self._left -= size_bytes
        if self._left < 0:
            raise TrainingError(
                f"[data] '{self._path}' must hold {self._kind}, which grows at most "
                f"{_MOST_TIMES_LARGER} times, but it grows to over {self._most:,} bytes. If you trust "
                "the file, write it as plain text."
            )


def read_pieces(path: Path, on_bytes: OnBytes | None = None) -> Iterator[bytes]:
    """The content of a file in order, decompressed if its suffix is one of `COMPRESSED`.

    Raises:
        TrainingError: The file cannot be read, or decompresses to far too much.
    """
    try:
        with open_file(path) as stream:
            unpack = _UNPACKERS.get(path.suffix)
            growth = Growth(path, "compressed text", os.fstat(stream.fileno()).st_size)
            source = stream if unpack is None else unpack(stream)
            done = 0
            while piece := source.read(_PIECE_BYTES):
                if unpack is not None:
                    growth.add(len(piece))
                yield piece
                if on_bytes is not None:
                    on_bytes(stream.tell() - done)
                    done = stream.tell()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> TrainingError:
    """The error for a file that does not hold what its name promises."""
    return TrainingError(f"[data] '{path}' must be a readable UTF-8 text file: {error}.")

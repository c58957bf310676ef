"""Reads files, plain or compressed, piece by piece, so that their size does not matter."""

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import TrainingError
from ...files.opening import open_file

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


def read_pieces(path: Path, on_bytes: OnBytes | None = None) -> Iterator[bytes]:
    """The content of a file in order, decompressed if its suffix is one of `COMPRESSED`.

    Raises:
        TrainingError: The file cannot be read, or decompresses to far too much.
    """
    try:
        with open_file(path) as stream:
            unpack = _UNPACKERS.get(path.suffix)
            most = _SMALL_BYTES + _MOST_TIMES_LARGER * os.fstat(stream.fileno()).st_size
            source = stream if unpack is None else unpack(stream)
            unpacked = done = 0
            while piece := source.read(_PIECE_BYTES):
                unpacked += len(piece)
                if unpack is not None and unpacked > most:
                    raise TrainingError(
                        f"[data] '{path}' must be compressed text, which grows at most "
                        f"{_MOST_TIMES_LARGER} times, but it grows to over {most:,} bytes. If you "
                        "trust the file, decompress it yourself."
                    )
                yield piece
                if on_bytes is not None:
                    on_bytes(stream.tell() - done)
                    done = stream.tell()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> TrainingError:
    """The error for a file that does not hold what its name promises."""
    return TrainingError(f"[data] '{path}' must be a readable UTF-8 text file: {error}.")

"""A file of the Hub that is only partly in the cache: its beginning, the hash of that, and its lock."""

import fcntl
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import DownloadError

_PIECE_BYTES = 1 << 20
_WAIT_S = 0.2
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")

OnBytes = Callable[[int], object]


def is_hash(etag: str) -> bool:
    """Whether an etag is a hash of the content."""
    return (_SHA256.fullmatch(etag) or _GIT_SHA1.fullmatch(etag)) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file of the Hub.

    Attributes:
        name: Its path in the repository.
        url: Its address.
        nbytes: Its size.
        etag: The hash of its content.
        content: Where the cache keeps the content.
    """

    name: str
    url: str
    nbytes: int
    etag: str
    content: Path

    @property
    def part(self) -> Path:
        """Where the cache keeps the beginning until the rest has come."""
        return self.content.with_name(f"{self.etag}.incomplete")

    @property
    def part_bytes(self) -> int:
        """The number of bytes of the beginning."""
        return self.part.stat().st_size if self.part.exists() else 0

    def new_digest(self) -> Any:
        """A new hash of the kind that the Hub lists."""
        if _SHA256.fullmatch(self.etag):
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False)


class Part:
    """What the cache holds of a file so far, and its hash.

    Args:
        file: The file.
        stream: The open part.
        on_bytes: Called with the number of bytes that were read or written, and with a negative number
            for those that were dropped.

    Attributes:
        file: The file.
        nbytes: How many bytes there are.
    """

    def __init__(self, file: RemoteFile, stream: BinaryIO, on_bytes: OnBytes):
        self.file = file
        self.nbytes = 0
        self._stream = stream
        self._on_bytes = on_bytes
        self._digest = file.new_digest()

    @property
    def hash(self) -> str:
        """The hash of the bytes so far."""
        return str(self._digest.hexdigest())

    def read_again(self) -> None:
        """Hashes what an earlier process left."""
        if self.file.part_bytes > self.file.nbytes:
            self._stream.truncate(0)
        while piece := self._stream.read(_PIECE_BYTES):
            self._count(piece)

    def restart(self) -> None:
        """Drops all bytes."""
        self._on_bytes(-self.nbytes)
        self._stream.seek(0)
        self._stream.truncate()
        self.nbytes, self._digest = 0, self.file.new_digest()

    def write(self, piece: bytes) -> None:
        """Adds bytes.

        Raises:
            DownloadError: The file would become longer than the Hub lists.
        """
        if self.nbytes + len(piece) > self.file.nbytes:
            raise DownloadError(
                f"[load] '{self.file.name}' must have {self.file.nbytes} bytes, as the Hub lists, but "
                "more are sent. Try again."
            )
        rest = memoryview(piece)
        # an unbuffered stream may take a part of it
        while rest:
            rest = rest[self._stream.write(rest) :]
        self._count(piece)

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.nbytes += len(piece)
        self._on_bytes(len(piece))


@contextmanager
def locked_part(file: RemoteFile) -> Iterator[BinaryIO | None]:
    """Yields the beginning of a file to write to; `None` if another process has finished the file."""
    while not file.content.exists():
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(file.part, flags, 0o644), "r+b", buffering=0) as stream:
            _lock(stream, file)
            # in the meantime another process may have finished or deleted the part
            is_part = file.part.exists() and os.path.samestat(
                os.fstat(stream.fileno()), os.lstat(file.part)
            )
            if is_part and file.content.exists():
                file.part.unlink()
            elif is_part:
                yield stream
                return
    yield None


def _lock(stream: Any, file: RemoteFile) -> None:
    is_told = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_told:
                print(f"[load] another process downloads '{file.name}'; waiting", file=sys.stderr)
                is_told = True
            time.sleep(_WAIT_S)
        except OSError:
            # some network disks have no locks
            return

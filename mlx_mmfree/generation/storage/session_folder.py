"""A folder of session files, which several programs may share."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ...files.reading import real_path
from ...files.writing import (
    check_space,
    clear_leftovers,
    new_file,
    one_at_a_time,
    own_folders,
    sync,
    writing,
)
from .keys import TextKey
from .session_file import SessionContent, read_state, write_content

_PART = re.compile(r"[0-9a-f]{2}")

_FILE = re.compile(r"([0-9a-f]{64})-([0-9]{1,9})\.safetensors")

_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{16}\.mmfree")


class StoredText(NamedTuple):
    """A file of the folder.

    Attributes:
        key: Its text.
        nbytes: Its size.
        used: When it was used last, in nanoseconds.
    """

    key: TextKey
    nbytes: int
    used: int


class SessionFolder:
    """Files of sessions, by their texts. A file is there whole or not at all.

    Names are digests of the model and the text, so that models share a folder. The files lie in parts
    by their first letters, since a folder of very many is slow.

    Args:
        path: The folder. It is made for its owner alone if it is missing.

    Raises:
        CheckpointError: It cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = real_path(path)
        with writing("sessions", self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_space(self.path, 0)

    def file(self, key: TextKey) -> Path:
        """Where the session of a text lies."""
        digest = key.digest.hex()
        return self.path / digest[:2] / f"{digest}-{key.length}.safetensors"

    def texts(self) -> list[StoredText]:
        """All that there is, the one that was used longest ago first.

        What killed writers left is removed.
        """
        return sorted(self._texts(), key=lambda text: text.used)

    def _texts(self) -> Iterator[StoredText]:
        for part in own_folders(self.path, _PART):
            with suppress(FileNotFoundError), os.scandir(part) as entries:
                for entry in entries:
                    named = _FILE.fullmatch(entry.name)
                    unfinished = _UNFINISHED.fullmatch(entry.name)
                    if unfinished:
                        with one_at_a_time(part):
                            clear_leftovers(part / unfinished[1])
                    if named is None or not entry.is_file(follow_symlinks=False):
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        key = TextKey(bytes.fromhex(named[1]), int(named[2]))
                        yield StoredText(key, status.st_size, status.st_mtime_ns)

    def write(
        self, key: TextKey, content: SessionContent, chunks: Sequence[bytes | memoryview]
    ) -> None:
        """Writes a session. Once this returns, it outlives the process and the system.

        Raises:
            CheckpointError: The disk is full or the file cannot be written.
        """
        file = self.file(key)
        with writing("sessions", file):
            if not file.parent.exists():
                file.parent.mkdir(mode=0o700, exist_ok=True)
                sync(self.path)
            with new_file(file, content.nbytes) as new:
                write_content(new, content, chunks)

    def read(self, key: TextKey, content: SessionContent) -> bytes:
        """The packed state of a session.

        Raises:
            OSError: It is missing or cannot be read.
            ValueError: It is damaged; the message says in what way.
        """
        return read_state(self.file(key), content)

    def touch(self, key: TextKey) -> None:
        """Notes a session as used now, if it is still there."""
        with suppress(OSError):
            os.utime(self.file(key))

    def remove(self, key: TextKey) -> None:
        """Removes a session, if it is still there and may be removed."""
        with suppress(OSError):
            self.file(key).unlink()


_LISTINGS_PER_LIMIT = 16
"""How often the folder is listed while its limit is written once, since others write to it too."""

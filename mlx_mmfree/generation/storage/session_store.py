"""Where sessions are: in memory, on their way to the disk, and in files of a folder."""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any
from warnings import warn

from ...errors import CheckpointError
from .keys import BYTES_PER_TOKEN, TextKey
from .recent_texts import RecentTexts
from .session_file import SessionContent
from .session_folder import _LISTINGS_PER_LIMIT, SessionFolder
from .write_behind import _OVERHEAD_BYTES, WAITING_BYTES, WriteBehind


@dataclass(frozen=True)
class StoredSessions:
    """The contents of a store.

    Attributes:
        sessions: States that are kept, in memory or on the disk.
        memory_sessions: Those in memory.
        memory_bytes: What these take.
        disk_sessions: Those on the disk.
        disk_bytes: What these take.
        waiting: Those on their way to the disk.
        lost: How many the disk did not get, since it was too slow, too small or failing.
        damaged: How many files were removed because they were damaged.
    """

    sessions: int
    memory_sessions: int
    memory_bytes: int
    disk_sessions: int
    disk_bytes: int
    waiting: int
    lost: int
    damaged: int


class SessionStore:
    """Packed states of one or several models, by their texts.

    One thread reads and adds. A thread of the store writes to the disk.

    Args:
        memory_bytes: Bytes of memory at most; the tables' are estimated.
        folder: Where sessions outlive the process; `None`: nowhere.
        disk_bytes: Bytes of all files of the folder at most.

    Attributes:
        has_folder: Whether sessions go to the disk.
    """

    def __init__(self, memory_bytes: int, folder: SessionFolder | None, disk_bytes: int):
        self.has_folder = folder is not None
        self._lock = Lock()
        self._folder = folder
        self._memory: RecentTexts[Any] = RecentTexts(memory_bytes)
        self._disk: RecentTexts[None] = RecentTexts(disk_bytes)
        self._writer = WriteBehind(self._write_now, WAITING_BYTES)
        self._unlisted_bytes = 0
        self._lost = self._damaged = 0
        # the first of each kind, and which the caller has been reported
        self._problems: dict[str, str] = {}
        self._reported: set[str] = set()
        self._list()

    def prefixes(self, identity: bytes, tokens: bytes, below: int) -> list[TextKey]:
        """The keys of prefixes of a text, of lengths that some texts here have, the shortest first.

        Args:
            identity: The identity of the model.
            tokens: As `token_bytes` gives them.
            below: They are shorter than this, and this is no longer than the text.
        """
        with self._lock:
            lengths = sorted(self._memory.lengths.keys() | self._disk.lengths.keys())
        found, start = [], 0
        # each token is digested once
        digest = hashlib.sha256(identity)
        for length in lengths[: bisect_left(lengths, below)]:
            stop = length * BYTES_PER_TOKEN
            digest.update(tokens[start:stop])
            found.append(TextKey(digest.copy().digest(), length))
            start = stop
        return found

    def stored(self) -> StoredSessions:
        """The contents now; any thread may ask."""
        waiting = len(self._writer)
        with self._lock:
            in_memory_alone = sum(key not in self._disk for key in self._memory)
            return StoredSessions(
                sessions=len(self._disk) + in_memory_alone,
                memory_sessions=len(self._memory),
                memory_bytes=self._memory.nbytes,
                disk_sessions=len(self._disk),
                disk_bytes=self._disk.nbytes,
                waiting=waiting,
                lost=self._lost,
                damaged=self._damaged,
            )

    def is_on_disk(self, key: TextKey) -> bool:
        """Returns whether a session is written, so that it outlives the process."""
        with self._lock:
            return key in self._disk

    def in_memory(self, keys: Iterable[TextKey]) -> list[TextKey]:
        """The texts whose states are in memory."""
        with self._lock:
            return [key for key in keys if key in self._memory]

    def recall(self, key: TextKey) -> tuple[TextKey, Any] | None:
        """From memory the state that serves a text, and the text that it belongs to."""
        with self._lock:
            return self._memory.get(key)

    def remember(
        self, key: TextKey, state: Any, nbytes: int, prefixes: Sequence[TextKey] = ()
    ) -> None:
        """Takes a state into memory, in place of the states of prefixes that it serves, too.

        Args:
            key: The text.
            state: Its packed state.
            nbytes: What the chunks of the state take.
            prefixes: The prefixes.
        """
        with self._lock:
            self._memory.add(key, state, nbytes + _OVERHEAD_BYTES, prefixes)

    def serve(self, key: TextKey, prefixes: Iterable[TextKey]) -> None:
        """Lets the state of a text in memory serve prefixes of it too."""
        with self._lock:
            self._memory.serve(key, prefixes)

    def touch(self, key: TextKey) -> None:
        """Notes a session of the disk as used last, if it is there."""
        with self._lock:
            found = self._disk.get(key)
        if found is not None and self._folder is not None:
            self._folder.touch(key)

    def read(self, key: TextKey, content: SessionContent) -> bytes:
        """The state of a text from the disk.

        Raises:
            OSError: The file is missing or cannot be read.
            ValueError: It is damaged; the message says in what way.
        """
        if self._folder is None:
            raise FileNotFoundError(f"no folder holds {key}")
        return self._folder.read(key, content)

    def write(
        self, key: TextKey, content: SessionContent, chunks: Sequence[bytes | memoryview]
    ) -> None:
        """Takes the chunks of a state that the disk shall get, and returns at once."""
        self._tell()
        if self._folder is not None:
            given_up = self._writer.add(key, (content, chunks), content.nbytes)
            with self._lock:
                self._lost += given_up

    def drop(self, key: TextKey, problem: str | None = None) -> None:
        """Forgets a session of the disk, and removes its file if that has a problem."""
        with self._lock:
            self._disk.remove(key)
        if problem is not None and self._folder is not None:
            self._folder.remove(key)
            self._damaged += 1
            self._note(
                "damaged",
                f"[sessions] '{self._folder.file(key)}' {problem}. It is removed, and its text will be "
                "read again. More such files will be removed without a word.",
            )
            self._tell()

    def flush(self) -> None:
        """Waits until the disk has all sessions that it shall get."""
        self._writer.flush()
        self._tell()

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        self._writer.close()
        self._tell()

    def _write_now(
        self, key: TextKey, job: tuple[SessionContent, Sequence[bytes | memoryview]]
    ) -> None:
        """Runs on the thread of the writer."""
        content, chunks = job
        folder = self._folder
        if folder is None:
            return
        try:
            if content.nbytes > self._disk.limit:
                raise CheckpointError(
                    f"[sessions] '{folder.path}' must take a session of {content.nbytes:,} bytes but "
                    f"has a limit of {self._disk.limit:,} bytes. Raise the limit."
                )
            folder.write(key, content, chunks)
        except CheckpointError as error:
            with self._lock:
                self._lost += 1
            self._note("unwritten", f"{error} Until then, sessions are in memory alone.")
            return
        with self._lock:
            gone = self._disk.add(key, None, content.nbytes)
        for old in gone:
            folder.remove(old)
        self._unlisted_bytes += content.nbytes
        if self._unlisted_bytes * _LISTINGS_PER_LIMIT > self._disk.limit:
            self._list()

    def _list(self) -> None:
        """Looks what the folder holds, and removes what is too much."""
        if self._folder is None:
            return
        found: RecentTexts[None] = RecentTexts(self._disk.limit)
        gone = [
            key for text in self._folder.texts() for key in found.add(text.key, None, text.nbytes)
        ]
        with self._lock:
            self._disk = found
        for key in gone:
            self._folder.remove(key)
        self._unlisted_bytes = 0

    def _note(self, kind: str, problem: str) -> None:
        with self._lock:
            self._problems.setdefault(kind, problem)

    def _tell(self) -> None:
        """Warns of the first problem of each kind, on the thread of the caller."""
        with self._lock:
            new = self._problems.keys() - self._reported
            self._reported |= new
        for kind in sorted(new):
            warn(self._problems[kind], stacklevel=4)

"""Where sessions are: in memory, on their way to the disk, and in files of a folder.

A file holds a text, and the model's state after it, in safetensors. Everything but the numbers is known
before a file is read: for which model, version, text and settings it must be. So its header is not
parsed but compared, byte by byte, and its sizes are those expected.
"""

import hashlib
import json
import os
import re
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, Generic, NamedTuple, TypeVar
from warnings import warn

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..files.reading import open_file, real_path
from ..files.tensors import TensorSpec, file_head
from ..files.writing import (
    check_space,
    clear_leftovers,
    new_file,
    one_at_a_time,
    own_folders,
    sync,
    writing,
)
from ..models import Decoder
from ..models.parts.stack import check_tokens
from ..version import __version__
from .states import arrays_by_place, blank_state, fingerprint

BYTES_PER_TOKEN = 4


class TextKey(NamedTuple):
    """Names a text read by one model.

    Attributes:
        digest: SHA-256 of the model's identity and the tokens, as `int32` of little-endian bytes. No two
            texts with the same one can be found on purpose.
        length: How many tokens there are.
    """

    digest: bytes
    length: int


def token_bytes(tokens: Sequence[int], vocab_size: int) -> bytes:
    """The tokens as they are digested.

    Raises:
        ValueError: One is no whole number within `[0, vocab_size)`.
    """
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < vocab_size):
        # much slower, and says what is wrong
        check_tokens(tokens, vocab_size)
    return ids.astype("<i4").tobytes()


def key_of(identity: bytes, tokens: bytes) -> TextKey:
    """The key of a text, of which `token_bytes` gives the tokens, for a model of this identity."""
    return TextKey(hashlib.sha256(identity + tokens).digest(), len(tokens) // BYTES_PER_TOKEN)


Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    nbytes: int
    serves: list[TextKey]


class RecentTexts(Generic[Value]):
    """A table of texts that forgets those that were used longest ago.

    What belongs to a text may also serve beginnings of it, which then have nothing of their own.

    Args:
        limit: Bytes at most.

    Attributes:
        nbytes: Bytes of all values.
        lengths: How many texts there are of each length, beginnings that are served included.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self.lengths: Counter[int] = Counter()
        self._entries: OrderedDict[TextKey, _Entry[Value]] = OrderedDict()
        # which entries serve a text, the newest last
        self._holders: dict[TextKey, dict[TextKey, None]] = {}

    def __len__(self) -> int:
        """The number of values."""
        return len(self._entries)

    def __iter__(self) -> Iterator[TextKey]:
        """The texts that have a value of their own."""
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._holders

    def get(self, key: TextKey) -> tuple[TextKey, Value] | None:
        """The state that serves a text, which then counts as used last, and its own text."""
        holders = self._holders.get(key)
        if holders is None:
            return None
        holder = next(reversed(holders))
        self._entries.move_to_end(holder)
        return holder, self._entries[holder].value

    def add(
        self, key: TextKey, value: Value, nbytes: int, beginnings: Sequence[TextKey] = ()
    ) -> list[TextKey]:
        """Takes what belongs to a text, in place of what belonged to it before.

        Args:
            key: The text.
            value: What belongs to it.
            nbytes: Bytes of the value.
            beginnings: Shorter texts that it serves, too.

        Returns:
            The texts that had to go: the new one alone, if it is larger than the limit.
        """
        self.remove(key)
        if nbytes > self.limit:
            return [key]
        for beginning in beginnings:
            self.remove(beginning)
        self._entries[key] = _Entry(value, nbytes, [])
        self.nbytes += nbytes
        self.serve(key, [key, *beginnings])
        gone = []
        while self.nbytes > self.limit:
            gone.append(next(iter(self._entries)))
            self.remove(gone[-1])
        return gone

    def serve(self, key: TextKey, beginnings: Iterable[TextKey]) -> None:
        """Lets what belongs to a text, if there is something, serve beginnings of it too."""
        entry = self._entries.get(key)
        if entry is None:
            return
        for served in beginnings:
            holders = self._holders.setdefault(served, {})
            if not holders:
                self.lengths[served.length] += 1
            if key not in holders:
                holders[key] = None
                entry.serves.append(served)

    def remove(self, key: TextKey) -> None:
        """Forgets what belongs to a text, if there is something."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.nbytes -= entry.nbytes
        for served in entry.serves:
            del self._holders[served][key]
            if not self._holders[served]:
                del self._holders[served]
                self.lengths[served.length] -= 1
                if not self.lengths[served.length]:
                    del self.lengths[served.length]


FORMAT_VERSION = "1"

_FORMAT, _MODEL = "mmfree_session", "mmfree_model"
_TOKENS, _STATE, _CHECKSUM = "tokens", "state.", "checksum"


class SessionContent(NamedTuple):
    """The contents of a session's file.

    Attributes:
        head: The header.
        tokens: The text, as `token_bytes` gives it.
        state_bytes: How many bytes the packed state has, which follows, and after it its SHA-256.
    """

    head: bytes
    tokens: bytes
    state_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        size = len(self.head) + len(self.tokens) + self.state_bytes
        return size + hashlib.sha256().digest_size


def identity_of(model: Decoder) -> bytes:
    """Tells models apart by all that their states depend on, the version of the library included."""
    settings = [mixer.state_kind.settings for mixer in model.token_mixers]
    described = [FORMAT_VERSION, __version__, fingerprint(model), settings]
    return hashlib.sha256(json.dumps(described).encode()).digest()


def content_of(model: Decoder, identity: bytes, tokens: bytes) -> SessionContent:
    """The required contents of a text's file."""
    length = len(tokens) // BYTES_PER_TOKEN
    arrays = arrays_by_place(blank_state(model, 1, length))
    specs = [TensorSpec(_STATE + place, each.dtype, each.shape) for place, each in arrays.items()]
    text = TensorSpec(_TOKENS, mx.int32, (length,))
    checksum = TensorSpec(_CHECKSUM, mx.uint8, (hashlib.sha256().digest_size,))
    metadata = {_FORMAT: FORMAT_VERSION, _MODEL: identity.hex()}
    head = file_head([text, *specs, checksum], metadata)
    return SessionContent(head, tokens, sum(spec.nbytes for spec in specs))


def write_content(
    file: Path, content: SessionContent, pieces: Sequence[bytes | memoryview]
) -> None:
    """Writes a session's file, with the pieces of its state.

    Raises:
        OSError: It cannot be written.
    """
    checksum = hashlib.sha256()
    with open(file, "xb") as stream:
        stream.write(content.head)
        stream.write(content.tokens)
        for piece in pieces:
            checksum.update(piece)
            stream.write(piece)
        stream.write(checksum.digest())


def read_state(file: Path, content: SessionContent) -> bytes:
    """The packed state of a session's file.

    Raises:
        OSError: It is missing or cannot be read.
        ValueError: It is damaged or holds something else; the message says what.
    """
    with open_file(file, is_member=True) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size != content.nbytes:
            raise ValueError(f"has {size:,} bytes in place of {content.nbytes:,}")
        if stream.read(len(content.head)) != content.head:
            raise ValueError("belongs to another model or version")
        if stream.read(len(content.tokens)) != content.tokens:
            raise ValueError("holds another text")
        state = stream.read(content.state_bytes)
        if stream.read() != hashlib.sha256(state).digest():
            raise ValueError("has changed bytes")
    return state


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
        self, key: TextKey, content: SessionContent, pieces: Sequence[bytes | memoryview]
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
                write_content(new, content, pieces)

    def read(self, key: TextKey, content: SessionContent) -> bytes:
        """The packed state of a session.

        Raises:
            OSError: It is missing or cannot be read.
            ValueError: It is damaged; the message says in what way.
        """
        return read_state(self.file(key), content)

    def touch(self, key: TextKey) -> None:
        """Marks a session as used now, where it is still there."""
        with suppress(OSError):
            os.utime(self.file(key))

    def remove(self, key: TextKey) -> None:
        """Removes a session, if it is still there and may be removed."""
        with suppress(OSError):
            self.file(key).unlink()


Job = TypeVar("Job")


class WriteBehind(Generic[Job]):
    """Jobs that a thread does in their order. While too many bytes wait, the oldest jobs are given up.

    Args:
        work: Does a job; it must not raise.
        limit: Bytes that may wait. A job alone may have more.
    """

    def __init__(self, work: Callable[[TextKey, Job], None], limit: int):
        self._work = work
        self._limit = limit
        self._changed = Condition()
        self._waiting: OrderedDict[TextKey, tuple[Job, int]] = OrderedDict()
        self._nbytes = 0
        self._busy: TextKey | None = None
        self._is_closed = False
        self._thread: Thread | None = None

    def __len__(self) -> int:
        """How many jobs wait or are being done."""
        with self._changed:
            return len(self._waiting) + (self._busy is not None)

    def add(self, key: TextKey, job: Job, nbytes: int) -> int:
        """Takes a job, unless one for the same text waits or is being done.

        Returns:
            How many jobs were given up.

        Raises:
            RuntimeError: It is closed.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("[Sessions] must not be used after 'close'.")
            if key == self._busy or key in self._waiting:
                return 0
            if self._thread is None:
                self._thread = Thread(target=self._run, name="sessions", daemon=True)
                self._thread.start()
            self._waiting[key] = job, nbytes
            self._nbytes += nbytes
            given_up = 0
            while self._nbytes > self._limit and len(self._waiting) > 1:
                self._pop()
                given_up += 1
            self._changed.notify_all()
            return given_up

    def flush(self) -> None:
        """Waits until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._busy is None)

    def close(self) -> None:
        """Does what is left and ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _pop(self) -> tuple[TextKey, Job]:
        key, (job, nbytes) = self._waiting.popitem(last=False)
        self._nbytes -= nbytes
        return key, job

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        finally:
            # nobody waits for a thread that has ended
            with self._changed:
                self._waiting.clear()
                self._busy = None
                self._changed.notify_all()

    def _do_next(self) -> bool:
        """Does a job, or returns `False` if it is closed and none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return False
            key, job = self._pop()
            self._busy = key
        self._work(key, job)
        with self._changed:
            self._busy = None
            self._changed.notify_all()
        return True


WAITING_BYTES = 2**28
"""Bytes that may wait for the disk."""

_OVERHEAD_BYTES = 500
"""About what the tables take for a session in memory (measured)."""
_LISTINGS_PER_LIMIT = 16
"""How often the folder is listed while its limit is written once, since others write to it too."""


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
        # the first of each kind, and which the caller has been told
        self._problems: dict[str, str] = {}
        self._told: set[str] = set()
        self._list()

    def beginnings(self, identity: bytes, tokens: bytes, below: int) -> list[TextKey]:
        """The keys of beginnings of a text, of lengths that some texts here have, the shortest first.

        Args:
            identity: That of the model.
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
        """Whether a session is written, so that it outlives the process."""
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
        self, key: TextKey, state: Any, nbytes: int, beginnings: Sequence[TextKey] = ()
    ) -> None:
        """Takes a state into memory, in place of the states of beginnings that it serves, too.

        Args:
            key: The text.
            state: Its packed state.
            nbytes: What the pieces of the state take.
            beginnings: The beginnings.
        """
        with self._lock:
            self._memory.add(key, state, nbytes + _OVERHEAD_BYTES, beginnings)

    def serve(self, key: TextKey, beginnings: Iterable[TextKey]) -> None:
        """Lets the state of a text in memory serve beginnings of it too."""
        with self._lock:
            self._memory.serve(key, beginnings)

    def touch(self, key: TextKey) -> None:
        """Marks a session of the disk as used last, if it is there."""
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
        self, key: TextKey, content: SessionContent, pieces: Sequence[bytes | memoryview]
    ) -> None:
        """Takes the pieces of a state that the disk shall get, and returns at once."""
        self._tell()
        if self._folder is not None:
            given_up = self._writer.add(key, (content, pieces), content.nbytes)
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
        content, pieces = job
        folder = self._folder
        if folder is None:
            return
        try:
            if content.nbytes > self._disk.limit:
                raise CheckpointError(
                    f"[sessions] '{folder.path}' must take a session of {content.nbytes:,} bytes but "
                    f"has a limit of {self._disk.limit:,} bytes. Raise the limit."
                )
            folder.write(key, content, pieces)
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
            new = self._problems.keys() - self._told
            self._told |= new
        for kind in sorted(new):
            warn(self._problems[kind], stacklevel=4)

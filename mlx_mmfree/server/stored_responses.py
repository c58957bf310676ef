"""Responses that are stored, so that a conversation can go on from them by their name alone."""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from ..files.writing import writing
from .errors import RequestError
from .settings import Settings

_log = logging.getLogger(__name__)
_NAME = re.compile(r"resp_[0-9a-f]{48}")
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})[0-9a-f]{1,8}")
_SUFFIX, _NEW = ".json", ".new"
# the order was not in the names at first
_FILE = re.compile(r"(resp_[0-9a-f]{48})(?:\.([0-9]{1,18}))?(\.json|\.new)")

Record = dict[str, Any]


def new_name() -> str:
    """A name that nobody can guess."""
    return f"resp_{secrets.token_hex(24)}"


@dataclass(frozen=True, order=True)
class _Entry:
    """A record that is stored, or what a killed writer left of one.

    Attributes:
        order: Greater than for all that were used before, whatever the clock says.
        key: Its key in the storage.
        name: Its name; empty for what was left.
        used: The time of its last use.
        size: Its bytes.
    """

    order: int
    key: str
    name: str
    used: float
    size: int


class _Storage(Protocol):
    """A storage of records."""

    def entries(self, name: str | None = None) -> list[_Entry]:
        """All records, or the records of a name."""

    def read(self, entry: _Entry, order: int) -> bytes | None:
        """A record, which is the last one used by that; `None` if it is gone."""

    def write(self, name: str, order: int, data: bytes) -> None:
        """Stores a record, whole or not at all."""

    def remove(self, entry: _Entry) -> None:
        """Forgets a record."""


class _Memory:
    def __init__(self) -> None:
        self._records: dict[str, tuple[_Entry, bytes]] = {}

    def entries(self, name: str | None = None) -> list[_Entry]:
        found = [entry for entry, _ in self._records.values()]
        return found if name is None else [entry for entry in found if entry.name == name]

    def read(self, entry: _Entry, order: int) -> bytes | None:
        found = self._records.get(entry.name)
        if found is None:
            return None
        self.write(entry.name, order, found[1])
        return found[1]

    def write(self, name: str, order: int, data: bytes) -> None:
        self._records[name] = _Entry(order, name, name, time.time(), len(data)), data

    def remove(self, entry: _Entry) -> None:
        self._records.pop(entry.name, None)


class _Folder:
    """Files for the server's user alone. A kill leaves each whole or absent.

    A file's name has the record's order, and its time is the time of the last use. Files are not forced
    onto the disk, for which all streams would wait: after a power cut the last ones may be missing, and
    damaged ones are not used.
    """

    def __init__(self, path: Path):
        self._path = path
        with writing("serve", path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in path.glob(f"*{_NEW}"):
                left.unlink(missing_ok=True)

    def entries(self, name: str | None = None) -> list[_Entry]:
        found = []
        for file in os.scandir(self._path):
            parts = _FILE.fullmatch(file.name) if file.name.startswith(name or "") else None
            if parts is not None and (name is None or parts[3] == _SUFFIX):
                # another may have removed it
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    order = -1 if parts[3] == _NEW else int(parts[2] or 0)
                    own = "" if parts[3] == _NEW else parts[1]
                    found.append(_Entry(order, file.name, own, status.st_mtime, status.st_size))
        return found

    def read(self, entry: _Entry, order: int) -> bytes | None:
        file = self._path / self._key(entry.name, order)
        try:
            (self._path / entry.key).rename(file)
            handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(handle, "rb") as opened:
            os.utime(handle)
            return opened.read()

    def write(self, name: str, order: int, data: bytes) -> None:
        new = self._path / f"{name}{_NEW}"
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            new.replace(self._path / self._key(name, order))
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def remove(self, entry: _Entry) -> None:
        (self._path / entry.key).unlink(missing_ok=True)

    def _key(self, name: str, order: int) -> str:
        return f"{name}.{order}{_SUFFIX}"


class StoredResponses:
    """Responses by name, for those who bring the key under which they were made.

    Args:
        settings: The key, the folder and the limits. Those used longest ago go first.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._key = (settings.api_key or "").encode("utf-8", "surrogateescape")
        self._lock = Lock()
        self._storage: _Storage = _Memory()
        if settings.response_folder is not None:
            self._storage = _Folder(settings.response_folder)
        self._order = 0
        self._forget()

    def keep(self, name: str, record: Record) -> bool:
        """Stores a record under a new name; whether the disk and the limits let it."""
        data = json.dumps({"owner": self._owner(name), "record": record}).encode()
        with self._lock:
            try:
                self._storage.write(name, self._next(), data)
            except OSError as error:
                _log.warning("A response cannot be kept: %s.", error)
                return False
            self._forget()
            return self._entry(name) is not None

    def find(self, name: str) -> Record | None:
        """The record of a name; `None` if there is none for this key."""
        if not _NAME.fullmatch(name):
            return None
        with self._lock:
            entry = self._entry(name)
            if entry is None:
                return None
            if entry.used < self._oldest():
                self._storage.remove(entry)
                return None
            data = self._storage.read(entry, self._next())
        if data is None:
            return None
        try:
            # a record may be nested deeper and be larger than the requests that it comes from
            value = json.loads(data)
            owner, record = value["owner"], value["record"]
            is_own = hmac.compare_digest(owner, self._owner(name))
        except (ValueError, LookupError, TypeError, RecursionError):
            _log.warning("A stored response is damaged and not used.")
            return None
        return dict(record) if is_own else None

    def remove(self, name: str) -> bool:
        """Forgets a record; whether there was one for this key."""
        if self.find(name) is None:
            return False
        with self._lock:
            entry = self._entry(name)
            if entry is not None:
                self._storage.remove(entry)
            return entry is not None

    def chain(self, name: str) -> Iterator[Record]:
        """A record and the records that it goes on from, the last first.

        Raises:
            RequestError: One of them is not stored, or they are too large together.
        """
        size = 0
        for _ in range(self._settings.kept_responses):
            record = self.find(name)
            if record is None:
                raise not_stored("previous_response_id", name)
            size += record["size"]
            if size > self._settings.max_body_bytes:
                raise self._too_large("previous_response_id")
            yield record
            if record["previous"] is None:
                return
            name = record["previous"]
        raise not_stored("previous_response_id", name)

    def items(self, parameters: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Items of stored responses by their ids, which tell of the response.

        Args:
            parameters: The ids, each with the parameter of the request that has it.

        Raises:
            RequestError: One of them is not stored, or they are too large together.
        """
        found: dict[str, dict[str, Any]] = {}
        size = 0
        for name, param in parameters.items():
            if name not in found:
                response = _ITEM_ID.fullmatch(name)
                record = self.find(f"resp_{response[1]}") if response else None
                own = [] if record is None else [*record["input"], *record["response"]["output"]]
                found |= {item["id"]: item for item in own if item["id"] in parameters}
            if name not in found:
                raise RequestError(
                    f"[request] {param!r} must refer to an item of a response that this server keeps "
                    f"but {name!r:.80} is none. Send the item itself.",
                    404,
                    param=param,
                    code="item_not_found",
                )
            size += len(json.dumps(found[name]))
            if size > self._settings.max_body_bytes:
                raise self._too_large(param)
        return found

    def _too_large(self, param: str) -> RequestError:
        most = self._settings.max_body_bytes
        return RequestError(
            f"[request] the conversation before must have at most {most:,} bytes but has more.",
            413,
            param=param,
        )

    def _entry(self, name: str) -> _Entry | None:
        return max(self._storage.entries(name), default=None)

    def _next(self) -> int:
        """An order after all that were given."""
        self._order += 1
        return self._order

    def _owner(self, name: str) -> str:
        return hmac.new(self._key, name.encode(), hashlib.sha256).hexdigest()

    def _oldest(self) -> float:
        """The time of the last use before which one is too old."""
        return time.time() - self._settings.kept_response_s

    def _forget(self) -> None:
        """Removes what is too old, and what is too much."""
        entries = sorted(self._storage.entries(), reverse=True)
        # another server may keep its own in the same folder
        self._order = max([self._order, *(entry.order for entry in entries[:1])])
        oldest, size = self._oldest(), 0
        for number, entry in enumerate(entries, 1):
            size += entry.size
            is_much = size > self._settings.kept_response_bytes
            if entry.used < oldest or is_much or number > self._settings.kept_responses:
                self._storage.remove(entry)


def not_stored(param: str, name: str) -> RequestError:
    """The error for a request that names a response which is not there, or not for its key."""
    return RequestError(
        f"[request] {param!r} must name a response that this server keeps but {name!r:.80} is none. It "
        "may have been deleted, or be too old.",
        404,
        param=param,
        code="previous_response_not_found" if param == "previous_response_id" else "not_found",
    )

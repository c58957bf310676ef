"""Locks on folders and files. A lock ends with its process.

The package `filelock` would leave a file beside each folder.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNKNOWN = -1
"""Takes the place of a handle where the system has no locks, as on some network disks."""


def try_lock(folder: Path) -> int | None:
    """Locks a folder.

    Returns:
        A handle that holds the lock until it is closed; `None` if another process holds it;
        `UNKNOWN` if the folder cannot be locked.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return UNKNOWN
    return _locked(handle)


def try_lock_file(file: Path) -> int | None:
    """Locks a file, which is made if it is missing. Whoever holds the lock may remove it.

    Returns:
        As `try_lock`.

    Raises:
        OSError: The file cannot be made.
    """
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = _locked(os.open(file, flags, 0o600))
        if handle is None or handle == UNKNOWN:
            return handle
        with suppress(FileNotFoundError):
            # a holder that ended in between has removed the file, and another may be there
            if os.path.samestat(os.fstat(handle), os.stat(file, follow_symlinks=False)):
                return handle
        os.close(handle)


def _locked(handle: int) -> int | None:
    """The handle, if its lock could be taken; it is closed otherwise. As for `try_lock`."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return None if isinstance(error, BlockingIOError) else UNKNOWN
    return handle


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keeps other processes out while the block lists a folder and makes entries in it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # some network disks have no locks
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def own_folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    """The folders inside a folder whose names match and that belong to this user. Links do not count."""
    found = []
    for entry in os.scandir(parent):
        with suppress(FileNotFoundError):
            if not name.fullmatch(entry.name):
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(parent / entry.name)
    return found

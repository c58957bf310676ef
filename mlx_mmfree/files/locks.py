"""Locks on folders, which last for as long as their process and need no file of their own."""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNKNOWN = -1
"""Stands for a handle where it cannot be known whether a folder is locked, as on some network disks."""


def try_lock(folder: Path) -> int | None:
    """Locks a folder.

    Returns:
        A handle that holds the lock until it is closed; `None` if another one does, or `UNKNOWN`.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return UNKNOWN
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return None if isinstance(error, BlockingIOError) else UNKNOWN
    return handle


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keeps others out for the moment in which entries of a folder are looked for and made."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # some network disks have no locks
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def own_folders(parent: Path, name: re.Pattern[str]) -> list[Path]:
    """The folders in a folder whose names match and that belong to this user; links are none."""
    found = []
    for entry in os.scandir(parent):
        with suppress(FileNotFoundError):
            if not name.fullmatch(entry.name):
                continue
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(parent / entry.name)
    return found

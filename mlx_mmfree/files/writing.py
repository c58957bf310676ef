"""Writes files and folders that appear under their names only when they are complete.

Each is written in a staging folder beside its target, `.<name>.<random>.mmfree`. Only its owner can put
links into the staging folder, and it stays locked for as long as its writer lives. The next writer of
the same target removes the staging folders of killed writers, and puts back what they had moved aside.
"""

import atexit
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from ..errors import CheckpointError

SPARE_BYTES = 16_000_000
"""The space that stays free beside what is written."""


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuses a folder that cannot be written to, or whose disk has too little space.

    Raises:
        OSError: The folder cannot be written to, or the disk is too full. The message names the needed
            and the free megabytes.
    """
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(
            f"{_megabytes(needed_bytes)} are needed and {_megabytes(SPARE_BYTES)} stay free, but only "
            f"{_megabytes(free)} are free"
        )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


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


_PREFIX = "mlx_mmfree-scratch-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


def new_scratch_folder() -> Path:
    """Makes a folder that is deleted when the process ends, and deletes the folders of killed processes.

    Raises:
        OSError: There is no space for temporary files.
    """
    parent = Path(tempfile.gettempdir())
    for folder in own_folders(parent, _NAME):
        handle = try_lock(folder)
        if handle is not None and handle != UNKNOWN:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)
    made = _locked_folder()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _locked_folder() -> Path:
    """A new folder that stays locked until the process ends, in whatever way it ends."""
    while True:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # another process may take a folder without a lock for one that was left, and remove it
        if try_lock(made) is not None and made.exists():
            return made


_SUFFIX = ".mmfree"
_STAGE = re.compile(rf"\.(.+)\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
_NEW, _OLD = "new", "old"
_FINDER = ".DS_Store"

# path within a folder to the inode, size and time, which change whenever the entry does
_Listing = dict[str, tuple[int, int, int]]


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it. If the block fails, those that it made and left empty go again.

    Raises:
        OSError: A folder cannot be made.
    """
    made = list(takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in made:
            # one that holds something stays, as do those above it
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def new_file(target: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a path to write to. The file replaces the target when the block ends.

    The path has the target's suffix. A target that is a link is replaced itself. If the block fails, the
    target stays as it was.

    Args:
        target: The file.
        needed_bytes: About its size. The disk must have that much space; 0 skips the check.

    Raises:
        OSError: The folder cannot be written to, or the disk has too little space.
    """
    with made_folder(target.parent), _stage(target, needed_bytes, is_alone=False) as stage:
        file = stage / f"{_NEW}{target.suffix}"
        yield file
        sync(file)
        os.replace(file, target)
        sync(target.parent)


@contextmanager
def new_folder(target: Path, *, replaces: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder to write to. It replaces the target when the block ends.

    Args:
        target: A folder that does not exist or is empty, or, with `replaces`, any folder.
        replaces: Remove the folder that is there. It stays if it changes in the meantime.
        needed_bytes: About the size of its files. The disk must have that much space; 0 skips the check.

    Raises:
        OSError: The folder cannot be written to, the disk has too little space, another process is
            writing it, or somebody has put files there.
    """
    with made_folder(target.parent), _stage(target, needed_bytes, is_alone=True) as stage:
        before = _listing(target) if replaces else {}
        folder = stage / _NEW
        folder.mkdir()
        yield folder
        _sync_all(folder)
        if _listing(target) != before:
            raise _changed(target)
        if before:
            target.rename(stage / _OLD)
            if _listing(stage / _OLD) != before:
                raise _changed(target)
        try:
            # the system refuses to replace a folder that is not empty
            folder.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise _changed(target) from error
            raise
        sync(target.parent)


@contextmanager
def writing(caller: str, target: Path) -> Iterator[None]:
    """Turns errors of writing into one line about the target.

    Raises:
        CheckpointError: The system or MLX could not write.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"[{caller}] '{target}' cannot be written: {error}. Check the disk and the permissions, or "
            "choose another path."
        ) from error


def clear_leftovers(target: Path) -> bool:
    """Removes what killed writers of a target left, and puts back what they had moved aside.

    Returns:
        Whether another writer is at work.
    """
    is_busy = False
    for stage in _stages(target):
        handle = try_lock(stage)
        if handle is None:
            is_busy = True
        elif handle != UNKNOWN:
            try:
                _settle(stage, target)
            finally:
                os.close(handle)
    return is_busy


def target_of_stage(entry: Path) -> str | None:
    """The name of the target whose staging folder an entry is; `None` if it is none of this user's."""
    found = _STAGE.fullmatch(entry.name)
    if found is None or entry not in own_folders(entry.parent, re.compile(re.escape(entry.name))):
        return None
    return found[1]


def sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _stage(target: Path, needed_bytes: int, *, is_alone: bool) -> Iterator[Path]:
    """Makes a locked staging folder beside the target."""
    if needed_bytes:
        check_space(target.parent, needed_bytes)
    stage = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_SUFFIX}")
    with one_at_a_time(target.parent):
        if clear_leftovers(target) and is_alone:
            raise OSError(f"another process is writing '{target}' at this moment")
        stage.mkdir(mode=0o700)
        handle = try_lock(stage)
    try:
        yield stage
    finally:
        _settle(stage, target)
        if handle is not None and handle != UNKNOWN:
            os.close(handle)


def _stages(target: Path) -> list[Path]:
    """The staging folders of a target that this user made."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{16}}{re.escape(_SUFFIX)}")
    return own_folders(target.parent, pattern)


def _settle(stage: Path, target: Path) -> None:
    """Puts back a folder that was moved aside but never replaced, and removes the staging folder."""
    if (stage / _OLD).exists() and (stage / _NEW).exists():
        try:
            (stage / _OLD).rename(target)
        except OSError:
            # somebody has made another folder in the meantime, so all of them stay
            return
    shutil.rmtree(stage, ignore_errors=True)


def _listing(folder: Path) -> _Listing:
    """Every entry below a folder; empty if the folder does not exist."""
    found: _Listing = {}
    for parent, folders, files in os.walk(folder):
        # the Finder writes this file into every folder that it shows
        for name in {*folders, *files} - {_FINDER}:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            inside = os.path.relpath(path, folder)
            is_folder = stat.S_ISDIR(status.st_mode)
            found[inside] = (
                status.st_ino,
                0 if is_folder else status.st_size,
                0 if is_folder else status.st_mtime_ns,
            )
    return found


def _changed(target: Path) -> OSError:
    return OSError(
        f"files in '{target}' were added or changed in the meantime; they stay, and nothing is written"
    )


def _sync_all(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))

"""The folder of a run: created before the work begins, and of one run at a time."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import local

from ..errors import TrainingError
from ..files.writing import UNKNOWN, try_lock_file
from .checkpoint import kept_state

_LOCK_FILE = ".lock"


class _Own(local):
    """The run folders of this thread. The functions that it calls may take them again."""

    folders: frozenset[Path] = frozenset()


_OWN = _Own()


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Turns a failed write inside the `with` block into one line about the run.

    Raises:
        TrainingError: The system refused a write, because the disk is full or the folder read-only.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"[training] '{run}' cannot be written: {error.strerror or error}; {kept_state(run)}. Free "
            "some space or choose another folder."
        ) from error


def make_run_folder(run: Path) -> None:
    """Creates the folder if it is missing, and tries to write into it.

    Raises:
        TrainingError: The folder cannot be written.
    """
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=run)
        os.close(handle)
        os.unlink(name)


@contextmanager
def own_run_folder(run: Path, *, is_first: bool = True) -> Iterator[None]:
    """Creates the folder as `make_run_folder` does, and keeps other runs out of it inside the block.

    Args:
        run: The folder.
        is_first: Whether this is the process that writes files. Another one belongs to the same run.

    Raises:
        TrainingError: The folder cannot be written, or another run is at work there.
    """
    make_run_folder(run)
    real = run.resolve()
    if not is_first or real in _OWN.folders:
        yield
        return
    file = real / _LOCK_FILE
    with writing(run):
        handle = try_lock_file(file)
    if handle is None:
        raise TrainingError(
            f"[training] '{run}' must be the folder of one run at a time but another process trains "
            "there. Wait until it ends, stop it, or choose another folder."
        )
    _OWN.folders |= {real}
    try:
        yield
    finally:
        _OWN.folders -= {real}
        file.unlink(missing_ok=True)
        if handle != UNKNOWN:
            os.close(handle)

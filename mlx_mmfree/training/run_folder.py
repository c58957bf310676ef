"""The folder of a run: made before the work begins, and what is said when it cannot be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TrainingError
from .checkpoint import kept_state


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Turns the system's refusal to write into one line about the run.

    Raises:
        TrainingError: The disk is full, the folder is read-only, or the like.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"[training] '{run}' cannot be written: {error.strerror or error}; {kept_state(run)}. Make "
            "room or give another folder."
        ) from error


def make_run_folder(run: Path) -> None:
    """Makes the folder where it is missing and tries to write into it.

    Raises:
        TrainingError: It cannot be written.
    """
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=run)
        os.close(handle)
        os.unlink(name)

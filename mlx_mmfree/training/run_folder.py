"""The folder of a run: created before the work begins, with one message if it cannot be written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TrainingError
from .checkpoint import kept_state


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

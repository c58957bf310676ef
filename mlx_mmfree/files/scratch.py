"""Folders for files that a process needs only while it runs."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

from .locks import UNKNOWN, one_at_a_time, own_folders, try_lock

_PREFIX = "mlx_mmfree-scratch-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


def new_scratch_folder() -> Path:
    """Makes a folder that is deleted when the process ends, and deletes those of killed processes.

    Raises:
        OSError: There is no room for temporary files.
    """
    parent = Path(tempfile.gettempdir())
    with one_at_a_time(parent):
        for folder in own_folders(parent, _NAME):
            handle = try_lock(folder)
            if handle is not None and handle != UNKNOWN:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)
        made = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # the lock is held until the process ends, in whatever way it ends
        try_lock(made)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made

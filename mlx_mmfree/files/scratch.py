"""Folders for files that a process needs only while it runs."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

from .locks import UNKNOWN, own_folders, try_lock

_PREFIX = "mlx_mmfree-scratch-"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")


def new_scratch_folder() -> Path:
    """Makes a folder that is deleted when the process ends, and deletes those of killed processes.

    Raises:
        OSError: There is no room for temporary files.
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

"""Folders for what a process needs only while it runs."""

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
    """A new folder that goes when the process does; what killed processes left goes now.

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
        # held until the process ends, however it does
        try_lock(made)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made

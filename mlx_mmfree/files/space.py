"""Checks that a disk has room for what is to be written."""

import errno
import os
import shutil
from pathlib import Path

SPARE_BYTES = 16_000_000
"""The room that stays free beside what is written."""


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuses a folder that cannot be written to, or whose disk has too little room.

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

"""Checks that a file can be written before the work whose result it will hold."""

import os
from pathlib import Path

from ...errors import UsageError


def check_writable(place: str, file: Path, *, makes_folder: bool = False) -> None:
    """Refuses a file that cannot be created or replaced.

    Args:
        place: The command in brackets and the argument that names the file in quotes.
        file: The file that will be written.
        makes_folder: Whether missing folders will be created too.

    Raises:
        UsageError: The file's folder is missing or not writable, or the file is a folder itself.
    """
    file = file.expanduser()
    folder = file.parent
    while makes_folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if file.is_dir():
        reason = "is a folder"
    elif not folder.is_dir():
        reason = f"cannot be made: there is no folder '{folder}'"
    elif not os.access(folder, os.W_OK):
        reason = f"cannot be made: '{folder}' may not be written to"
    else:
        return
    raise UsageError(f"{place} must be a file that can be written but '{file}' {reason}.")

"""Whether a file can be written, asked before the work whose result it will hold."""

import os
from pathlib import Path

from ...errors import UsageError


def check_writable(place: str, file: Path, *, makes_folder: bool = False) -> None:
    """Refuses a file that cannot be made or replaced.

    Args:
        place: The command, and in quotes the argument that names the file.
        file: What will be written.
        makes_folder: Whether missing folders are made too.

    Raises:
        UsageError: Its folder is missing or may not be written to, or it is a folder itself.
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

"""Paths as users write them."""

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` replaced by the home folder. The name of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def visible(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names match, sorted, without hidden ones.

    On exFAT and network drives macOS writes a hidden `._name` beside each file, of another kind.
    """
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def real_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path behind all links. A loop of links stays, and fails when it is opened."""
    return Path(os.path.realpath(expanded(path)))

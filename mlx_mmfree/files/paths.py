"""Paths as users write them."""

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` replaced by the home folder; the name of an unknown user stays."""
    return Path(os.path.expanduser(path))


def real_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path behind all links; a loop of links stays, to fail where it is opened."""
    return Path(os.path.realpath(expanded(path)))

"""Pictures in folders, one for each class."""

import hashlib
from pathlib import Path

import numpy as np

from ...errors import TrainingError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def read_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of the class of each picture, `(N,)`, and the names of the folders, sorted.

    Raises:
        TrainingError: There is no folder of a class, or one cannot be read.
    """
    names = tuple(each.name for each in _entries(path) if each.is_dir())
    if not names:
        raise TrainingError(
            f"[data] '{path}' must hold a folder of pictures for each class but holds no folder."
        )
    counts = [len(_pictures(path / name)) for name in names]
    return np.repeat(np.arange(len(names)), counts), names


def read_pictures(path: Path) -> list[Path]:
    """The pictures of all classes, in the order of the labels; raises as `read_labels`."""
    return [file for each in _entries(path) if each.is_dir() for file in _pictures(each)]


def digest_of(path: Path) -> str:
    """Tells the names and sizes of the pictures: to read them all would take too long."""
    files = read_pictures(path)
    lines = [f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _pictures(folder: Path) -> list[Path]:
    return [each for each in _entries(folder) if each.suffix.lower() in SUFFIXES]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise TrainingError(f"[data] '{folder}' cannot be read: {error}.") from error

"""The labelled images of a file or folder, whatever its form."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from ...errors import TrainingError
from . import array_file, class_folders, idx_file


@dataclass(frozen=True)
class LabelledImage:
    """An image and its class.

    Attributes:
        picture: A file, or pixels `(H, W)` or `(H, W, 3)`, uint8.
        label: The number of the class.
        length, size: An image counts once.
    """

    length: ClassVar[int] = 1
    size: ClassVar[int] = 1

    picture: Any
    label: int


def read_classes(path: Path) -> tuple[int, tuple[str, ...]]:
    """The number of classes of a file or folder, and what they are called, if it says so.

    Raises:
        TrainingError: As for `read_images`.
    """
    labels, names = _form(path).read_labels(path)
    return len(names) or int(labels.max(initial=-1)) + 1, names


def read_images(path: Path, classes: Sequence[str], count: int) -> list[LabelledImage]:
    """The images of a file or folder, with the numbers that a model gives to their classes.

    Args:
        path: A folder with a folder of pictures for each class; an `.npz` file with `images`, `labels`
            and perhaps `label_names`; or an IDX file of images, with that of its labels beside it.
        classes: What the model calls its classes, in order; empty if it does not say.
        count: How many classes it has.

    Raises:
        TrainingError: There are no such images, or one is of a class that the model does not have.
    """
    form = _form(path)
    labels, names = form.read_labels(path)
    pictures = form.read_pictures(path)
    if len(pictures) != len(labels) or not len(labels):
        raise TrainingError(
            f"[data] '{path}' must hold images and as many labels but holds {len(pictures)} images and "
            f"{len(labels)} labels."
        )
    numbers = _numbers(path, labels, names, classes, count)
    return [LabelledImage(*each) for each in zip(pictures, numbers, strict=True)]


def digest_of(path: Path) -> str:
    """What tells the content of a file; of pictures in folders, their names and sizes do."""
    digest: str = _form(path).digest_of(path)
    return digest


def _form(path: Path) -> ModuleType:
    if path.is_dir():
        return class_folders
    return array_file if path.suffix == ".npz" else idx_file


def _numbers(
    path: Path, labels: np.ndarray, names: Sequence[str], classes: Sequence[str], count: int
) -> list[int]:
    """The model's numbers of classes for those of a file."""
    if names and classes:
        missing = [name for name in names if name not in classes]
        if missing:
            raise TrainingError(
                f"[data] the classes of '{path}' must be among those of the model, "
                f"{', '.join(map(repr, classes))[:200]}, but {missing[0]!r:.80} is not. Give a model of "
                "these classes, or 'new_head' for those of the training files."
            )
        own = np.array([classes.index(name) for name in names])
        # a damaged file may have numbers beyond its names
        labels = own[labels] if int(labels.max()) < len(own) else labels + count
    if int(labels.max()) >= count:
        raise TrainingError(
            f"[data] the labels of '{path}' must be from 0 to {count - 1}, as the model has {count} "
            f"classes, but go beyond. Give a model of more classes."
        )
    return [int(label) for label in labels]

"""The labelled images of a file or folder: `.npz` files, folders of classes, or IDX files."""

import gzip
import hashlib
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from ..errors import TrainingError
from ..files.reading import open_file
from .run_folder import file_digest

MAX_BYTES = 16 * 10**9
_MAX_HEADER = 4096
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def array_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of the class of each image, int `(N,)`, and `label_names`, if the file has them.

    Raises:
        TrainingError: The file cannot be read, or has no such arrays.
    """
    labels, names = _array(path, "labels"), _array(path, "label_names", is_needed=False)
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "iu" or (labels < 0).any():
        raise _wrong(path, "labels", "whole numbers from 0, of shape (N,)", labels)
    if names is None:
        return labels.astype(np.int64), ()
    if names.ndim != 1 or names.dtype.kind != "U":
        raise _wrong(path, "label_names", "texts, of shape (K,)", names)
    return labels.astype(np.int64), tuple(names.tolist())


def array_pictures(path: Path) -> np.ndarray:
    """The pixels, uint8 `(N, H, W)` or `(N, H, W, 3)`; raises as `array_labels`."""
    images = _array(path, "images")
    is_grey = images is not None and images.ndim == 4 and images.shape[3] == 1
    pixels = images[..., 0] if images is not None and is_grey else images
    if pixels is None or pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise _wrong(path, "images", "uint8, of shape (N, H, W) or (N, H, W, 3)", images)
    if pixels.shape[3:] not in ((), (3,)) or not all(pixels.shape[1:]):
        raise _wrong(path, "images", "uint8, of shape (N, H, W) or (N, H, W, 3)", images)
    return pixels


def _wrong(path: Path, name: str, rule: str, array: np.ndarray | None) -> TrainingError:
    got = "is missing" if array is None else f"is {array.dtype} {array.shape}"
    return TrainingError(f"[data] '{name}' of '{path}' must be {rule} but {got}.")


def _array(path: Path, name: str, *, is_needed: bool = True) -> np.ndarray | None:
    """An array of the file; `None` if it has none of this name.

    numpy itself makes space for what a header says before it reads, so that a small file could ask for
    all memory. Here the header must agree with the size of its member first.
    """
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as members:
            if f"{name}.npy" not in members.namelist():
                return None
            entry = members.getinfo(f"{name}.npy")
            if entry.file_size > MAX_BYTES:
                raise ValueError(f"'{name}' has more than {MAX_BYTES:,} bytes")
            with members.open(entry) as stream:
                return _array_of(stream, entry.file_size)
    # zipfile meets damage and encryption with errors of several kinds
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TrainingError(
            f"[data] '{path}' must be a sound .npz file but cannot be read: {error}."
        ) from error


def _array_of(stream: IO[bytes], size_bytes: int) -> np.ndarray:
    version = np.lib.format.read_magic(stream)
    if version not in _VERSIONS:
        raise ValueError(f"arrays of version {version} are not known")
    shape, is_fortran, dtype = _VERSIONS[version](stream, max_header_size=_MAX_HEADER)
    needed = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or needed != size_bytes - stream.tell():
        raise ValueError(f"the header speaks of {dtype} {shape}, which is not what follows")
    data = stream.read(needed)
    if len(data) != needed:
        raise ValueError("it ends too early")
    return np.ndarray(shape, dtype, data, order="F" if is_fortran else "C")


SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


def folder_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
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


def folder_pictures(path: Path) -> list[Path]:
    """The pictures of all classes, in the order of the labels; raises as `folder_labels`."""
    return [file for each in _entries(path) if each.is_dir() for file in _pictures(each)]


def folder_digest(path: Path) -> str:
    """Tells the names and sizes of the pictures: to read them all would take too long."""
    files = folder_pictures(path)
    lines = [f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _pictures(folder: Path) -> list[Path]:
    return [each for each in _entries(folder) if each.suffix.lower() in SUFFIXES]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise TrainingError(f"[data] '{folder}' cannot be read: {error}.") from error


_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_BYTES = 0x08


def idx_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of the class of each image, int `(N,)`; the format has no names for classes.

    Raises:
        TrainingError: A file cannot be read, or is of another format.
    """
    return _idx_array(_labels_of(path), 1).astype(np.int64), ()


def idx_pictures(path: Path) -> np.ndarray:
    """The pixels, uint8 `(N, H, W)`; raises as `idx_labels`."""
    return _idx_array(path, 3)


def idx_digest(path: Path) -> str:
    """Tells the content of both files."""
    return f"{file_digest(path)} {file_digest(_labels_of(path))}"


def _labels_of(path: Path) -> Path:
    if _IMAGES not in path.name:
        raise TrainingError(
            f"[data] '{path}' must be a folder with a folder of pictures for each class, an .npz file "
            f"with 'images' and 'labels', or an IDX file whose name has '{_IMAGES}' in it."
        )
    return path.with_name(path.name.replace(_IMAGES, _LABELS))


def _idx_array(path: Path, dims: int) -> np.ndarray:
    """The numbers of a file with so many dims, uint8."""
    try:
        with open_file(path) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            zeros, kind, found = struct.unpack(">HBB", stream.read(4))
            if (zeros, kind, found) != (0, _BYTES, dims):
                raise ValueError(f"it does not begin as IDX of {dims} dims of bytes does")
            shape = struct.unpack(f">{dims}I", stream.read(4 * dims))
            needed = math.prod(shape)
            if needed > MAX_BYTES:
                raise ValueError(f"it speaks of {needed:,} bytes, more than {MAX_BYTES:,}")
            data = stream.read(needed + 1)
            if len(data) != needed or not all(shape[1:]):
                raise ValueError(f"it speaks of the shape {shape} but is of another size")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise TrainingError(
            f"[data] '{path}' must be a sound IDX file but cannot be read: {error}."
        ) from error
    return np.frombuffer(data, np.uint8).reshape(shape)


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
    labels, names = _format(path).labels(path)
    return len(names) or int(labels.max(initial=-1)) + 1, names


def read_images(path: Path, classes: Sequence[str], count: int) -> list[LabelledImage]:
    """The images of a file or folder, with the numbers that a model gives to their classes.

    Args:
        path: A folder with a folder of pictures for each class; an `.npz` file with `images`, `labels`
            and perhaps `label_names`; or an IDX file of images, with the file of its labels beside it.
        classes: What the model calls its classes, in order; empty if it does not say.
        count: How many classes it has.

    Raises:
        TrainingError: There are no such images, or one is of a class that the model does not have.
    """
    format = _format(path)
    labels, names = format.labels(path)
    pictures = format.pictures(path)
    if len(pictures) != len(labels) or not len(labels):
        raise TrainingError(
            f"[data] '{path}' must hold images and as many labels but holds {len(pictures)} images and "
            f"{len(labels)} labels."
        )
    numbers = _numbers(path, labels, names, classes, count)
    return [LabelledImage(*each) for each in zip(pictures, numbers, strict=True)]


def digest_of(path: Path) -> str:
    """The fingerprint of a file's content; for pictures in folders, their names and sizes."""
    return _format(path).digest(path)


@dataclass(frozen=True)
class _Format:
    """How images and labels are stored."""

    labels: Callable[[Path], tuple[np.ndarray, tuple[str, ...]]]
    pictures: Callable[[Path], Any]
    digest: Callable[[Path], str]


def _format(path: Path) -> _Format:
    if path.is_dir():
        return _Format(folder_labels, folder_pictures, folder_digest)
    if path.suffix == ".npz":
        return _Format(array_labels, array_pictures, file_digest)
    return _Format(idx_labels, idx_pictures, idx_digest)


def _numbers(
    path: Path, labels: np.ndarray, names: Sequence[str], classes: Sequence[str], count: int
) -> list[int]:
    """The model's numbers of classes for the file's."""
    if names and classes:
        missing = [name for name in names if name not in classes]
        if missing:
            raise TrainingError(
                f"[data] the classes of '{path}' must be among the model's, "
                f"{', '.join(map(repr, classes))[:200]}, but {missing[0]!r:.80} is not. Give a model of "
                "these classes, or 'new_head' for the classes of the training files."
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

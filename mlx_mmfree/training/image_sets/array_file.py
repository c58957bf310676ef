"""Images and labels in an `.npz` file of numpy, read without pickle and within limits.

numpy itself makes room for what a header says before it reads, so that a small file could ask for all
memory. Here the header must agree with the size of its member first.
"""

import math
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file
from ..run_folder import file_digest as digest_of  # noqa: F401, one of the functions of each form

MAX_BYTES = 16 * 10**9
_MAX_HEADER = 4096
_VERSIONS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
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


def read_pictures(path: Path) -> np.ndarray:
    """The pixels, uint8 `(N, H, W)` or `(N, H, W, 3)`; raises as `read_labels`."""
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
    """An array of the file; `None` if it has none of this name."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as members:
            if f"{name}.npy" not in members.namelist():
                return None
            entry = members.getinfo(f"{name}.npy")
            if entry.file_size > MAX_BYTES:
                raise ValueError(f"'{name}' has more than {MAX_BYTES:,} bytes")
            with members.open(entry) as stream:
                return _read(stream, entry.file_size)
    # zipfile meets damage and encryption with errors of several kinds
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise TrainingError(
            f"[data] '{path}' must be a sound .npz file but cannot be read: {error}."
        ) from error


def _read(stream: IO[bytes], size_bytes: int) -> np.ndarray:
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

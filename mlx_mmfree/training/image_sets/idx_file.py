"""Images in the IDX form of MNIST, plain or compressed, with the file of their labels beside them."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file
from ..run_folder import file_digest

MAX_BYTES = 16 * 10**9
_IMAGES, _LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
_BYTES = 0x08


def read_labels(path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """The number of the class of each image, int `(N,)`; the form has no names for classes.

    Raises:
        TrainingError: A file cannot be read, or is of another form.
    """
    return _read(_labels_of(path), 1).astype(np.int64), ()


def read_pictures(path: Path) -> np.ndarray:
    """The pixels, uint8 `(N, H, W)`; raises as `read_labels`."""
    return _read(path, 3)


def digest_of(path: Path) -> str:
    """Tells the content of both files."""
    return f"{file_digest(path)} {file_digest(_labels_of(path))}"


def _labels_of(path: Path) -> Path:
    if _IMAGES not in path.name:
        raise TrainingError(
            f"[data] '{path}' must be a folder with a folder of pictures for each class, an .npz file "
            f"with 'images' and 'labels', or an IDX file whose name has '{_IMAGES}' in it."
        )
    return path.with_name(path.name.replace(_IMAGES, _LABELS))


def _read(path: Path, dims: int) -> np.ndarray:
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

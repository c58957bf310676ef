"""Where a tensor of a checkpoint is stored, whatever the format of its file, and how it is read."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .host_array import host_array
from .opening import UNREADABLE, open_file

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""The dtypes by their size. Floats are read as these, since NumPy has no bfloat16."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is stored.

    Attributes:
        name: Its name on disk.
        file: The file.
        dtype: Its MLX dtype once read.
        shape: Its shape once read.
        start: Its first byte in the file.
        stop: The byte after its last one.
        checksum: What `checksum` must give for its bytes; `None` if that is not known.
        decode: Turns its bytes, `uint8`, into the array; `None` if they are its values in order.
    """

    name: str
    file: Path
    dtype: mx.Dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: str | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


def read_tensor(entry: TensorEntry) -> mx.array:
    """Reads one tensor.

    Raises:
        CheckpointError: The file changed or cannot be read.
    """
    [(_, array)] = read_tensors(entry.file, [entry])
    return array


def read_tensors(file: Path, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, mx.array]]:
    """Yields the names and tensors of one file, one after the other in the given order.

    Args:
        file: The file.
        entries: The tensors to read, all of this file.

    Raises:
        CheckpointError: The file changed or cannot be read.
    """
    try:
        with open_file(file) as stream:
            for entry in entries:
                yield entry.name, _read_tensor(stream, entry)
    except OSError as error:
        raise CheckpointError(f"[load] '{file}' cannot be read: {error}. {UNREADABLE}") from error


def checksum(data: np.ndarray) -> str:
    """The SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(data.data).hexdigest()


def _read_tensor(stream: BufferedReader, entry: TensorEntry) -> mx.array:
    if entry.decode is not None:
        data = np.empty(entry.nbytes, np.uint8)
        _fill(data, stream, entry)
        return mx.array(entry.decode(data)).view(entry.dtype)
    array, memory = host_array(entry.shape, _UNSIGNED[entry.dtype.size])
    _fill(memory.reshape(-1).view(np.uint8), stream, entry)
    return array != 0 if entry.dtype == mx.bool_ else array.view(entry.dtype)


def _fill(memory: np.ndarray, stream: BufferedReader, entry: TensorEntry) -> None:
    """Reads the bytes of a tensor into memory."""
    stream.seek(entry.start)
    if stream.readinto(memory.data) < entry.nbytes:
        raise _changed(entry, "ends inside")
    if entry.checksum is not None and checksum(memory) != entry.checksum:
        raise _changed(entry, "has changed bytes in")


def _changed(entry: TensorEntry, problem: str) -> CheckpointError:
    return CheckpointError(
        f"[load] '{entry.file}' {problem} tensor {entry.name!r:.100}. The file is damaged; fetch or "
        "write it again."
    )

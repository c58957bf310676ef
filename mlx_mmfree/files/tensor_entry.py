"""Where one tensor of a checkpoint lies, whatever the format of its file, and how it is read."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .host_array import host_array
from .opening import open_file

_WHOLE_NUMBERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""By the bytes of a number; NumPy has no bfloat16."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: Its name on disk.
        file: The file.
        dtype: Its MLX dtype once read.
        shape: Its shape once read.
        start: Its first byte in the file.
        stop: The byte after its last one.
        checksum: What `checksum` must give for its bytes; `None` if it is not known.
        decode: Turns its bytes, `uint8`, into the array; `None`: they are its values in order.
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


def read_tensors(file: Path, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, mx.array]]:
    """Yields the tensors of one file by name, one after the other in the given order.

    Args:
        file: The file.
        entries: Tensors that lie in it.

    Raises:
        CheckpointError: The file changed or cannot be read.
    """
    try:
        with open_file(file) as stream:
            for entry in entries:
                yield entry.name, _read_tensor(stream, entry)
    except OSError as error:
        raise CheckpointError(f"[load] '{file}' cannot be read: {error}.") from error


def checksum(data: np.ndarray) -> str:
    """SHA-256 of bytes."""
    return hashlib.sha256(data.data).hexdigest()


def _read_tensor(stream: BufferedReader, entry: TensorEntry) -> mx.array:
    if entry.decode is not None:
        data = np.empty(entry.nbytes, np.uint8)
        _fill(data, stream, entry)
        return mx.array(entry.decode(data)).view(entry.dtype)
    array, room = host_array(entry.shape, _WHOLE_NUMBERS[entry.dtype.size])
    _fill(room.reshape(-1).view(np.uint8), stream, entry)
    return array != 0 if entry.dtype == mx.bool_ else array.view(entry.dtype)


def _fill(room: np.ndarray, stream: BufferedReader, entry: TensorEntry) -> None:
    """Reads the bytes of a tensor."""
    stream.seek(entry.start)
    # mx.load would hand out memory that was never filled where the disk fails.
    if stream.readinto(room.data) < entry.nbytes:
        raise _changed(entry, "ends inside")
    if entry.checksum is not None and checksum(room) != entry.checksum:
        raise _changed(entry, "has changed bytes in")


def _changed(entry: TensorEntry, problem: str) -> CheckpointError:
    return CheckpointError(
        f"[load] '{entry.file}' {problem} tensor {entry.name!r:.100}. The file is damaged; fetch or "
        "write it again."
    )

"""Reads PyTorch checkpoints (`.bin`, written by `torch.save`) from untrusted sources, without torch.

Format: a zip file with the entries `<name>/data.pkl`, a pickle that describes tensors (see
`torch_pickle`), and `<name>/data/<key>`, the numbers of each storage, little-endian.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .safetensors import TensorEntry, to_array
from .torch_pickle import MAX_PICKLE_BYTES, View, read_views
from .zip_container import ZipEntry, read_directory

_PICKLE = "data.pkl"
_LEGACY_START = b"\x80"
_WAY_OUT = (
    "Load it with torch.load(..., weights_only=True) and write it again with torch.save or as "
    "safetensors"
)
# a tied head is the same numbers under a second name; more would let a small file fill the memory
_MAX_NAMES_PER_BYTE = 2


@dataclass(frozen=True, kw_only=True)
class TorchEntry(TensorEntry):
    """Where one tensor lies; `start` is counted from the start of the file.

    Attributes:
        strides: The distance of neighbours along each axis, in numbers.
        storage: The range of bytes that the tensor lies in, with others perhaps.
    """

    strides: tuple[int, ...]
    storage: ZipEntry


def read_header(file: Path) -> dict[str, TorchEntry]:
    """Reads and checks the description of the tensors in one file; no tensor is loaded.

    Raises:
        CheckpointError: The file is missing, damaged, of the form before PyTorch 1.6, or asks for
            anything but tensors.
    """
    if not file.is_file():
        raise CheckpointError(f"[torch] '{file}' must be a file but is missing.")
    try:
        with open(file, "rb") as stream:
            if stream.read(1) == _LEGACY_START:
                raise CheckpointError(
                    f"[torch] '{file}' must be a zip file but is a bare pickle, as PyTorch wrote "
                    f"before version 1.6. {_WAY_OUT}."
                )
            entries = read_directory(file, stream)
            try:
                return _read_entries(file, stream, entries)
            except ValueError as error:
                raise CheckpointError(f"[torch] '{file}' {error}. {_WAY_OUT}.") from error
    except OSError as error:
        raise CheckpointError(f"[torch] '{file}' cannot be read: {error}.") from error


def read_tensors(file: Path, entries: Iterable[TensorEntry]) -> Iterator[tuple[str, mx.array]]:
    """Yields the tensors of one file by name, one after the other in the given order.

    Args:
        file: The file.
        entries: Tensors that `read_header` found in it; those of one storage one after the other,
            since only the last storage is kept.

    Raises:
        CheckpointError: The file changed or cannot be read.
    """
    kept: tuple[ZipEntry, np.ndarray] | None = None
    try:
        with open(file, "rb") as stream:
            for entry in entries:
                if not isinstance(entry, TorchEntry):
                    raise TypeError(f"'entries' must come from read_header but got {entry!r:.100}")
                if kept is None or kept[0] != entry.storage:
                    kept = None
                    kept = entry.storage, _read_content(file, stream, entry.storage)
                yield entry.name, _tensor(kept[1], entry)
    except OSError as error:
        raise CheckpointError(f"[torch] '{file}' cannot be read: {error}.") from error


def _read_entries(
    file: Path, stream: BinaryIO, entries: dict[str, ZipEntry]
) -> dict[str, TorchEntry]:
    pickles = [name for name in entries if name.split("/")[1:] == [_PICKLE]]
    if len(pickles) != 1:
        raise ValueError(f"must hold one {_PICKLE} but holds {len(pickles)}")
    root = pickles[0].removesuffix(_PICKLE)
    order = entries.get(f"{root}byteorder")
    if order is not None and (
        order.nbytes > 16 or _read_content(file, stream, order).tobytes() != b"little"
    ):
        raise ValueError("must hold little-endian numbers but says that it does not")
    description = entries[pickles[0]]
    if description.nbytes > MAX_PICKLE_BYTES:
        raise ValueError(
            f"must describe its tensors in at most {MAX_PICKLE_BYTES} bytes but needs "
            f"{description.nbytes}"
        )
    views = read_views(_read_content(file, stream, description).tobytes())
    tensors = {
        name: _entry(file, name, view, entries.get(f"{root}data/{view.storage.key}"))
        for name, view in views.items()
    }
    stored = sum(entry.nbytes for entry in {entry.storage for entry in tensors.values()})
    if sum(entry.nbytes for entry in tensors.values()) > _MAX_NAMES_PER_BYTE * stored:
        raise ValueError(f"must hold tensors of its own but has many that share {stored} bytes")
    return tensors


def _entry(file: Path, name: str, view: View, storage: ZipEntry | None) -> TorchEntry:
    dtype, needed = view.storage.dtype, view.storage.size * view.storage.dtype.size
    if storage is None or storage.nbytes != needed:
        found = "none" if storage is None else storage.nbytes
        raise ValueError(f"must have {needed} bytes for tensor {name!r:.100} but has {found}")
    start = storage.start + view.offset * dtype.size
    nbytes = int(np.prod(view.shape, dtype=object)) * dtype.size
    return TorchEntry(
        name, file, dtype, view.shape, start, start + nbytes, strides=view.strides, storage=storage
    )


def _read_content(file: Path, stream: BinaryIO, entry: ZipEntry) -> np.ndarray:
    stream.seek(entry.start)
    # a mapped file would end the process where the file shrinks or the disk fails
    content = np.fromfile(stream, np.uint8, entry.nbytes)
    if content.size < entry.nbytes or zlib.crc32(content.data) != entry.crc:
        raise CheckpointError(
            f"[torch] '{file}' has missing or changed bytes in its entry {entry.name!r:.100}. Fetch "
            "the file again."
        )
    return content


def _tensor(content: np.ndarray, entry: TorchEntry) -> mx.array:
    itemsize = entry.dtype.size
    numbers = content.view(f"u{itemsize}")[(entry.start - entry.storage.start) // itemsize :]
    steps = tuple(stride * itemsize for stride in entry.strides)
    strided = np.lib.stride_tricks.as_strided(numbers, entry.shape, steps, writeable=False)
    return to_array(np.asarray(strided, order="C"), entry.dtype)

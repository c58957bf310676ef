"""Reads PyTorch checkpoints (`.bin`, written by `torch.save`) from untrusted sources, without torch.

A checkpoint is a zip file. Its entry `<name>/data.pkl` is a pickle that describes the tensors (see
`pickle`), and each entry `<name>/data/<key>` holds the numbers of one storage, little-endian.
"""

import math
import zlib
from functools import partial
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..opening import UNREADABLE, open_member
from ..tensor_entry import TensorEntry
from .pickle import MAX_PICKLE_BYTES, View, read_views
from .zip_container import ZipEntry, read_directory

_PICKLE = "data.pkl"
_LEGACY_START = b"\x80"
_CHUNK_BYTES = 16_000_000
_WAY_OUT = (
    "Load it with torch.load(..., weights_only=True) and write it again with torch.save or as "
    "safetensors"
)
# A tied head gives the same numbers a second name. More names would let a small file fill the memory.
_MAX_SHARING = 2


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Reads and checks the description of the tensors in one file. No tensor is loaded.

    Raises:
        CheckpointError: The file is missing, damaged, older than PyTorch 1.6, or asks for anything but
            tensors.
    """
    if not file.exists():
        raise CheckpointError(
            f"[torch] '{file}' must be a file but is missing. Fetch it, or give the folder that holds "
            "it."
        )
    try:
        with open_member(file) as stream:
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
        raise CheckpointError(f"[torch] '{file}' cannot be read: {error}. {UNREADABLE}") from error


def _read_entries(
    file: Path, stream: BinaryIO, entries: dict[str, ZipEntry]
) -> dict[str, TensorEntry]:
    pickles = [name for name in entries if name.split("/")[1:] == [_PICKLE]]
    if len(pickles) != 1:
        raise ValueError(f"must hold one {_PICKLE} but holds {len(pickles)}")
    root = pickles[0].removesuffix(_PICKLE)
    order = entries.get(f"{root}byteorder")
    if order is not None and (order.nbytes > 16 or _read(stream, order) != b"little"):
        raise ValueError("must hold little-endian numbers but says that it does not")
    description = entries[pickles[0]]
    if description.nbytes > MAX_PICKLE_BYTES:
        raise ValueError(
            f"must describe its tensors in at most {MAX_PICKLE_BYTES} bytes but needs "
            f"{description.nbytes}"
        )
    views = read_views(_read(stream, description))
    storages = {
        name: _storage(name, view, entries.get(f"{root}data/{view.storage.key}"))
        for name, view in views.items()
    }
    stored = sum(storage.nbytes for storage in set(storages.values()))
    needed = sum(math.prod(view.shape) * view.storage.dtype.size for view in views.values())
    if needed > _MAX_SHARING * stored:
        raise ValueError(
            f"must share each byte among at most {_MAX_SHARING} tensors on average but describes "
            f"{needed} bytes of tensors in {stored} stored bytes"
        )
    # a tensor of a whole storage is compared with the checksum when it is read
    for storage in {storages[name] for name, view in views.items() if _is_part(view)}:
        _check(stream, storage)
    return {name: _entry(file, name, view, storages[name]) for name, view in views.items()}


def _is_part(view: View) -> bool:
    return 0 < view.span < view.storage.size


def _storage(name: str, view: View, storage: ZipEntry | None) -> ZipEntry:
    needed = view.storage.size * view.storage.dtype.size
    if storage is None or storage.nbytes != needed:
        found = "none" if storage is None else storage.nbytes
        raise ValueError(f"must have {needed} bytes for tensor {name!r:.100} but has {found}")
    return storage


def _entry(file: Path, name: str, view: View, storage: ZipEntry) -> TensorEntry:
    dtype = view.storage.dtype
    start = storage.start + view.offset * dtype.size
    crc = storage.crc if view.span == view.storage.size else None
    decode = partial(_decode, file, name, view, crc)
    return TensorEntry(
        name, file, dtype, view.shape, start, start + view.span * dtype.size, decode=decode
    )


def _decode(file: Path, name: str, view: View, crc: int | None, data: np.ndarray) -> np.ndarray:
    if crc is not None and zlib.crc32(data.data) != crc:
        raise CheckpointError(
            f"[torch] '{file}' has changed bytes in tensor {name!r:.100}. Fetch the file again."
        )
    itemsize = view.storage.dtype.size
    steps = tuple(stride * itemsize for stride in view.strides)
    numbers = np.lib.stride_tricks.as_strided(data.view(f"u{itemsize}"), view.shape, steps)
    # copies only where the order differs and, unlike ascontiguousarray, keeps the shape ()
    numbers = np.asarray(numbers, order="C")
    return numbers != 0 if view.storage.dtype == mx.bool_ else numbers


def _read(stream: BinaryIO, entry: ZipEntry) -> bytes:
    """The content of a small entry."""
    _check(stream, entry)
    stream.seek(entry.start)
    return stream.read(entry.nbytes)


def _check(stream: BinaryIO, entry: ZipEntry) -> None:
    """Compares an entry with its checksum, piece by piece."""
    stream.seek(entry.start)
    crc, remaining = 0, entry.nbytes
    while remaining:
        piece = stream.read(min(remaining, _CHUNK_BYTES))
        if not piece:
            break
        crc, remaining = zlib.crc32(piece, crc), remaining - len(piece)
    if remaining or crc != entry.crc:
        raise ValueError(f"has missing or changed bytes in its entry {entry.name!r:.100}")

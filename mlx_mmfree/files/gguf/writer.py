"""Writes GGUF files tensor by tensor; the format is described in `gguf`."""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .parts import part_name, split_metadata
from .reader import MAGIC
from .types import TYPES

VERSION = 3
ALIGNMENT = 32

_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_UINT16, _UINT32, _INT32, _FLOAT32, _BOOLEAN, _TEXT, _LIST = 2, 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class PlannedGGUFTensor:
    """A tensor that is made when it is written.

    Attributes:
        name: Its name in the file.
        kind: Name of its type.
        shape: Its shape, rows first.
        make: Makes its bytes, `uint8` of one axis.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return TYPES[_NUMBERS[self.kind]].nbytes(math.prod(self.shape))


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[PlannedGGUFTensor],
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Writes one file to the disk.

    Args:
        file: The file to make.
        metadata: Texts, booleans, whole numbers, floats, and lists of one of them.
        tensors: The tensors.
        on_bytes: Called with the number of bytes after each tensor.

    Raises:
        OSError: The disk refuses.
    """
    planned = list(tensors)
    header = MAGIC + struct.pack("<IQQ", VERSION, len(planned), len(metadata))
    header += b"".join(_text(key) + _entry(value) for key, value in metadata.items())
    position = 0
    for tensor in planned:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        header += _text(tensor.name) + sizes + struct.pack("<IQ", _NUMBERS[tensor.kind], position)
        position += tensor.nbytes + _padding(tensor.nbytes)
    with open(file, "wb") as stream:
        stream.write(header + bytes(_padding(len(header))))
        for tensor in planned:
            data = tensor.make()
            if data.dtype != np.uint8 or data.size != tensor.nbytes:
                raise RuntimeError(
                    f"tensor {tensor.name!r} was planned with {tensor.nbytes} bytes but has "
                    f"{data.nbytes}"
                )
            stream.write(np.ascontiguousarray(data).data)
            stream.write(bytes(_padding(data.size)))
            if on_bytes is not None:
                on_bytes(data.size)


def write_parts(
    folder: Path,
    stem: str,
    metadata: Mapping[str, Any],
    tensors: Sequence[PlannedGGUFTensor],
    max_bytes: int | None,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Writes a model as one file, or as several that hold at most so many bytes of tensors each.

    A tensor is never split. Arguments as for `write_gguf`.

    Raises:
        OSError: The disk refuses.
    """
    parts: list[list[PlannedGGUFTensor]] = [[]]
    room = max_bytes or 0
    for tensor in tensors:
        if max_bytes is not None and tensor.nbytes > room and parts[-1]:
            parts.append([])
            room = max_bytes
        parts[-1].append(tensor)
        room -= tensor.nbytes
    if len(parts) == 1:
        write_gguf(folder / f"{stem}.gguf", metadata, tensors, on_bytes)
        return
    described = split_metadata(metadata, len(parts), len(tensors))
    for number, (part, own) in enumerate(zip(parts, described, strict=True), 1):
        write_gguf(folder / part_name(stem, number, len(parts)), own, part, on_bytes)


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(value: Any) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, list):
        kind = _kind(value[0])
        return struct.pack("<IIQ", _LIST, kind, len(value)) + _values(kind, value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _values(kind, [value])


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOLEAN
    if isinstance(value, np.int32):
        return _INT32
    if isinstance(value, np.uint16):
        return _UINT16
    return {int: _UINT32, float: _FLOAT32, str: _TEXT}[type(value)]


def _values(kind: int, values: Sequence[Any]) -> bytes:
    if kind == _TEXT:
        return b"".join(map(_text, values))
    code = {_UINT16: "H", _UINT32: "I", _INT32: "i", _FLOAT32: "f", _BOOLEAN: "?"}[kind]
    return struct.pack(f"<{len(values)}{code}", *values)

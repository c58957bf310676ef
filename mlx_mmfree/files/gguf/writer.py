"""Writes GGUF files tensor by tensor, so that only one is in memory. `reader` describes the format."""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .format import ALIGNMENT, MAGIC, ValueType
from .parts import part_name, split_metadata
from .types import TYPES

VERSION = 3

_TENSOR_TYPES = {kind.name: number for number, kind in TYPES.items()}
_VALUE_TYPES = {
    bool: ValueType.BOOLEAN,
    int: ValueType.UINT32,
    float: ValueType.FLOAT32,
    str: ValueType.TEXT,
    np.int32: ValueType.INT32,
    np.uint16: ValueType.UINT16,
}
_STRUCT_CODES = {
    ValueType.UINT16: "H",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOLEAN: "?",
}


@dataclass(frozen=True)
class PlannedGGUFTensor:
    """A tensor that is made when it is written.

    Attributes:
        name: Its name in the file.
        kind: The name of its type.
        shape: Its shape, rows first.
        make: Makes its bytes, `uint8` of one axis.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return TYPES[_TENSOR_TYPES[self.kind]].nbytes(math.prod(self.shape))


def write_gguf(
    file: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[PlannedGGUFTensor],
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Writes one file to the disk.

    Args:
        file: The file to make.
        metadata: Texts, booleans, whole numbers, floats, and lists of values of one of these types.
        tensors: The tensors.
        on_bytes: Called after each tensor with the number of its bytes.

    Raises:
        OSError: The file cannot be written.
    """
    planned = list(tensors)
    header = MAGIC + struct.pack("<IQQ", VERSION, len(planned), len(metadata))
    header += b"".join(_text(key) + _entry(value) for key, value in metadata.items())
    position = 0
    for tensor in planned:
        sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        header += _text(tensor.name) + sizes
        header += struct.pack("<IQ", _TENSOR_TYPES[tensor.kind], position)
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
    """Writes a model as one file or as several parts. A tensor is never split.

    Args:
        folder: The folder to write to.
        stem: The name of the file without its suffix, or the beginning of the names of the parts.
        metadata, tensors, on_bytes: As for `write_gguf`.
        max_bytes: The largest number of bytes of tensors in a part, unless one tensor is larger. `None`
            writes one file.

    Raises:
        OSError: A file cannot be written.
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
    """The type of a value and the value, as bytes."""
    if isinstance(value, list):
        kind = _VALUE_TYPES[type(value[0])]
        return struct.pack("<IIQ", ValueType.LIST, kind, len(value)) + _values(kind, value)
    kind = _VALUE_TYPES[type(value)]
    return struct.pack("<I", kind) + _values(kind, [value])


def _values(kind: ValueType, values: Sequence[Any]) -> bytes:
    if kind == ValueType.TEXT:
        return b"".join(map(_text, values))
    return struct.pack(f"<{len(values)}{_STRUCT_CODES[kind]}", *values)

"""Reads the headers of GGUF files from untrusted sources. No tensor is loaded.

A file (versions 2 and 3, little-endian) begins with the magic `GGUF`, the version, the number of tensors
and the number of metadata entries. Then follow the entries, each as name, type and value, and the
descriptions of the tensors, each as name, number of sizes, sizes with the row length first, type and
offset. The data begin at a multiple of `general.alignment`.

The package `gguf` is not used: it trusts the counts and offsets of a file, and does not know I2_S,
Q2_0 and PQ2_0.
"""

import math
import os
import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ..opening import UNREADABLE, open_file
from .format import ALIGNMENT, MAGIC, ValueType
from .types import PQ2_0, Q2_0, TYPES, UNREAD, TensorType

VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64_000_000
MAX_VALUES = 4_000_000
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65_535

_NUMBERS = {
    ValueType.UINT8: "u1",
    ValueType.INT8: "i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.BOOLEAN: "u1",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
}
"""NumPy's names of the types of numbers."""

# name, number of the type, shape, offset
_Described = tuple[str, int, tuple[int, ...], int]


@dataclass(frozen=True)
class StoredTensor:
    """Where and how one tensor is stored.

    Attributes:
        name: Its name.
        kind: How it is stored.
        shape: Its shape, rows first.
        start: Its first byte in the file.
        stop: The byte after its last one.
    """

    name: str
    kind: TensorType
    shape: tuple[int, ...]
    start: int
    stop: int


class _Header:
    """The part of a file before its data, read piece by piece. No piece is longer than the rest."""

    def __init__(self, stream: BinaryIO, file: Path):
        self._stream = stream
        self._file = file
        self.size = os.fstat(stream.fileno()).st_size
        self.place = 0
        self._values = 0

    def problem(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"[GGUF] '{self._file}' {text}. The file is damaged or no GGUF file; fetch it again."
        )

    def take(self, count: int) -> bytes:
        if count > min(self.size, MAX_HEADER_BYTES) - self.place:
            raise self.problem(
                f"ends inside its header, which claims {count} bytes at {self.place} of {self.size}"
            )
        data = self._stream.read(count)
        if len(data) < count:
            raise self.problem("changed while it was read")
        self.place += count
        return data

    def whole_number(self, code: str) -> int:
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(value)

    def text(self) -> str:
        data = self.take(self.whole_number("<Q"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.problem(f"holds a text that is not UTF-8 ({error.reason})") from error

    def name(self) -> str:
        value = self.text()
        if not value or len(value) > MAX_NAME_BYTES:
            raise self.problem(f"holds the impossible name {value!r:.80}")
        return value

    def value(self, kind: int) -> Any:
        if kind == ValueType.TEXT:
            return self.text()
        if kind != ValueType.LIST:
            return self._numbers(kind, 1)[0]
        kind, count = self.whole_number("<I"), self.whole_number("<Q")
        # a value of one byte in the file takes many bytes in memory
        self._values += count
        if self._values > MAX_VALUES:
            raise self.problem(f"claims more than {MAX_VALUES:,} values in its lists")
        if kind == ValueType.TEXT:
            # each text takes at least 8 bytes of the file
            if count > (self.size - self.place) // 8:
                raise self.problem(f"claims a list of {count} texts")
            return [self.text() for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise self.problem(f"holds a value of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[ValueType(kind)])
        array = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return (array != 0).tolist() if kind == ValueType.BOOLEAN else array.tolist()


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Reads and checks everything before the data of one file.

    Returns:
        The metadata, and the tensors by their names.

    Raises:
        CheckpointError: The file is missing, truncated or not well formed.
        UnsupportedModelError: The file has a version, or a tensor a type, that is not read.
    """
    try:
        with open_file(file) as stream:
            return _read(_Header(stream, file), file)
    except OSError as error:
        raise CheckpointError(f"[GGUF] '{file}' cannot be read: {error}. {UNREADABLE}") from error


def _read(header: _Header, file: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if header.take(4) != MAGIC:
        raise header.problem("must begin with 'GGUF' but does not")
    version = header.whole_number("<I")
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"[GGUF] '{file}' must be of version {' or '.join(map(str, VERSIONS))}, little-endian, "
            f"but is of version {version}. Convert the model again with a current program."
        )
    tensor_count, entry_count = header.whole_number("<Q"), header.whole_number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        name = header.name()
        if name in metadata:
            raise header.problem(f"repeats the entry {name!r:.100}")
        metadata[name] = header.value(header.whole_number("<I"))
    described = [_describe(header) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 2**20 or alignment % 8:
        raise header.problem(f"gives the impossible alignment {alignment!r:.40}")
    data_start = -(-header.place // alignment) * alignment
    described = _with_layout_of_q2_0(header, described, header.size - data_start, alignment)
    tensors: dict[str, StoredTensor] = {}
    for name, number, shape, offset in described:
        if name in tensors:
            raise header.problem(f"repeats tensor {name!r:.100}")
        if offset % alignment:
            raise header.problem(f"gives tensor {name!r:.100} the impossible offset {offset}")
        tensors[name] = _placed(header, name, number, shape, data_start + offset)
    for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.start)):
        if after.start < before.stop:
            raise header.problem(f"has tensor {after.name!r:.100} overlapping another one")
    return metadata, tensors


def _with_layout_of_q2_0(
    header: _Header, described: list[_Described], size: int, alignment: int
) -> list[_Described]:
    """The tensors, with the type PQ2_0 where the file has the number of Q2_0 for it.

    Only the room that the file leaves for such tensors tells the two types apart.
    """
    starts = [*sorted(offset for *_, offset in described), size]
    rooms = [
        (shape, starts[min(bisect_right(starts, offset), len(described))] - offset)
        for _, number, shape, offset in described
        if number == Q2_0
    ]
    for meant in (Q2_0, PQ2_0):
        kind = TYPES[meant]
        if all(
            shape[-1] % kind.block == 0 and 0 <= room - kind.nbytes(math.prod(shape)) < alignment
            for shape, room in rooms
        ):
            return [
                (name, meant if number == Q2_0 else number, shape, offset)
                for name, number, shape, offset in described
            ]
    raise header.problem(
        "leaves room for its Q2_0 tensors that fits groups neither of 64 nor of 128, or ends early"
    )


def _describe(header: _Header) -> _Described:
    name, dimensions = header.name(), header.whole_number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise header.problem(f"gives tensor {name!r:.100} {dimensions} dimensions")
    sizes = [header.whole_number("<Q") for _ in range(dimensions)]
    if not all(0 < size < 2**31 for size in sizes):
        raise header.problem(f"gives tensor {name!r:.100} the impossible sizes {sizes!r:.80}")
    return name, header.whole_number("<I"), tuple(reversed(sizes)), header.whole_number("<Q")


def _placed(
    header: _Header, name: str, number: int, shape: tuple[int, ...], start: int
) -> StoredTensor:
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(known.name for known in TYPES.values())
        raise UnsupportedModelError(
            f"[GGUF] tensor {name!r:.100} must be stored as one of {known} but is stored as type "
            f"{number}{f' ({UNREAD[number]})' if number in UNREAD else ''}. Use a file with another "
            "quantisation."
        )
    if shape[-1] % kind.block:
        raise header.problem(
            f"stores tensor {name!r:.100} of {shape[-1]} inputs as {kind.name}, which takes a "
            f"multiple of {kind.block}"
        )
    stop = start + kind.nbytes(math.prod(shape))
    if stop > header.size:
        raise header.problem(f"ends before tensor {name!r:.100}, at {header.size} of {stop} bytes")
    return StoredTensor(name, kind, shape, start, stop)

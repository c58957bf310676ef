"""Reads the headers of GGUF files from untrusted sources, and writes such files tensor by tensor.

A file (versions 2 and 3, little-endian) begins with the magic `GGUF`, the version, the number of tensors
and the number of metadata entries. Then follow the entries, each as name, type and value, and the
descriptions of the tensors, each as name, number of sizes, sizes with the row length first, type and
offset. The data begin at a multiple of `general.alignment`.

The package `gguf` is not used: it trusts the counts and offsets of a file, and does not know I2_S,
Q2_0, PQ2_0 and PTQ1_0.

A model may lie in several files, named `name-00001-of-00003.gguf` and so on as by llama.cpp. The first
part holds the metadata of the model. Each part says under `split.` which part it is, and how many parts
and tensors there are. A tensor may be in any part.
"""

import math
import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from .gguf_blocks import PQ2_0, Q2_0, TYPES, UNREAD, TensorType
from .reading import UNREADABLE, open_file

MAGIC = b"GGUF"
ALIGNMENT = 32
"""The usual value of `general.alignment`: tensors begin at multiples of so many bytes."""


class ValueType(IntEnum):
    """The types of values in the metadata, by their numbers in the file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOLEAN = 7
    TEXT = 8
    LIST = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


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
    """The part of a file before its data, read chunk by chunk. No chunk is longer than the rest."""

    def __init__(self, stream: BinaryIO, file: Path):
        self._stream = stream
        self._file = file
        self.size = os.fstat(stream.fileno()).st_size
        self.offset = 0
        self._values = 0

    def problem(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"[GGUF] '{self._file}' {text}. The file is damaged or no GGUF file; fetch it again."
        )

    def take(self, count: int) -> bytes:
        if count > min(self.size, MAX_HEADER_BYTES) - self.offset:
            raise self.problem(
                f"ends inside its header, which claims {count} bytes at {self.offset} of {self.size}"
            )
        data = self._stream.read(count)
        if len(data) < count:
            raise self.problem("changed while it was read")
        self.offset += count
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
            if count > (self.size - self.offset) // 8:
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
    data_start = -(-header.offset // alignment) * alignment
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

    Only the space that the file leaves for such tensors tells the two types apart.
    """
    starts = [*sorted(offset for *_, offset in described), size]
    capacities = [
        (shape, starts[min(bisect_right(starts, offset), len(described))] - offset)
        for _, number, shape, offset in described
        if number == Q2_0
    ]
    for meant in (Q2_0, PQ2_0):
        kind = TYPES[meant]
        if all(
            shape[-1] % kind.block == 0
            and 0 <= capacity - kind.nbytes(math.prod(shape)) < alignment
            for shape, capacity in capacities
        ):
            return [
                (name, meant if number == Q2_0 else number, shape, offset)
                for name, number, shape, offset in described
            ]
    raise header.problem(
        "leaves space for its Q2_0 tensors that fits groups neither of 64 nor of 128, or ends early"
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


NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.ASCII | re.DOTALL)
_MAX_PARTS = 1000


def part_name(stem: str, number: int, count: int) -> str:
    """The name of a part, counted from 1."""
    return f"{stem}-{number:05d}-of-{count:05d}.gguf"


def part_names(name: str) -> list[str]:
    """The names of all parts of the model that a file belongs to, in order."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= _MAX_PARTS:
        return [name]
    count = int(match[3])
    return [part_name(match[1], number, count) for number in range(1, count + 1)]


_IN_FLOATS = re.compile(r"[-._](?:BF16|F16|F32)\b", re.ASCII | re.IGNORECASE)


def whole_models(names: Iterable[str]) -> list[str]:
    """The models among some file names, each by the name of its first part, floats last.

    A file with `mmproj` in its name is what puts pictures before a model, and no model.
    """
    models = {part_names(name)[0] for name in names if "mmproj" not in name.lower()}
    return sorted(models, key=lambda name: (_IN_FLOATS.search(name) is not None, name))


def read_parts(file: Path) -> tuple[dict[str, Any], list[tuple[Path, StoredTensor]]]:
    """Reads and checks everything before the data of a model's files.

    Args:
        file: The file, or any one of the parts.

    Returns:
        The metadata, and each tensor with the file that holds it.

    Raises:
        CheckpointError: A part is missing, damaged or belongs to another model.
        UnsupportedModelError: As for `read_gguf`.
    """
    files = [file.with_name(name) for name in part_names(file.name)]
    metadata, stored = read_gguf(files[0])
    count = metadata.get(COUNT, 1)
    if count not in (0, 1) and count != len(files):
        raise CheckpointError(
            f"[GGUF] '{file}' must be named as one of the {count!r:.40} parts of its model, such as "
            f"'{part_name('model', 1, 3)}', but is not. Give all parts the names that they came with."
        )
    found = [(files[0], tensor) for tensor in stored.values()]
    for number, part in enumerate(files):
        if number:
            own, stored = read_gguf(part)
            found += [(part, tensor) for tensor in stored.values()]
        else:
            own = metadata
        if len(files) > 1 and (own.get(NUMBER), own.get(COUNT)) != (number, len(files)):
            raise CheckpointError(
                f"[GGUF] '{part}' must be part {number + 1} of {len(files)} but says in 'split.no' and "
                f"'split.count' {own.get(NUMBER)!r:.40} and {own.get(COUNT)!r:.40}. Fetch it again."
            )
    names = {tensor.name for _, tensor in found}
    total = metadata.get(TENSORS, len(found)) if len(files) > 1 else len(found)
    if len(names) != len(found) or total != len(found):
        raise CheckpointError(
            f"[GGUF] the {len(files)} parts of '{file}' must hold {total!r:.40} different tensors but "
            f"hold {len(names)} in {len(found)}. Fetch the parts again."
        )
    return metadata, found


def split_metadata(
    metadata: Mapping[str, Any], count: int, tensors: int
) -> Iterator[dict[str, Any]]:
    """Yields the metadata of each of `count` parts."""
    for number in range(count):
        own = {
            NUMBER: np.uint16(number),
            COUNT: np.uint16(count),
            TENSORS: np.int32(tensors),
        }
        yield {**(metadata if number == 0 else {}), **own}


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
        stem: The name of the file without its suffix, or the prefix of the names of the parts.
        metadata, tensors, on_bytes: As for `write_gguf`.
        max_bytes: The largest number of bytes of tensors in a part, unless one tensor is larger. `None`
            writes one file.

    Raises:
        OSError: A file cannot be written.
    """
    parts: list[list[PlannedGGUFTensor]] = [[]]
    capacity = max_bytes or 0
    for tensor in tensors:
        if max_bytes is not None and tensor.nbytes > capacity and parts[-1]:
            parts.append([])
            capacity = max_bytes
        parts[-1].append(tensor)
        capacity -= tensor.nbytes
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

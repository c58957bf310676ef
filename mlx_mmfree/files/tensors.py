"""Where tensors are stored, whatever the format of their file, and safetensors files.

A safetensors file holds the length of its header (8 bytes, little-endian), the header, which is a JSON
object `{name: {dtype, shape, data_offsets}}`, and the data. The header is checked before any tensor is
read. `mx.load` is not used: it hands out memory that was never filled where a read fails. Files are
written tensor by tensor, so that only one is in memory; `mx.save_safetensors` needs all at once.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from .checkpoint_files import INDEX_FILE, WEIGHTS_FILE
from .reading import UNREADABLE, open_file, parse_json_object, write_json


def host_array(shape: Sequence[int], dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    """A new array, and a NumPy view of its memory to fill before MLX uses the array.

    Not for the gradient of a function that has its own: MLX remembers there how each array was computed,
    and a compiled graph computes it once more, without what NumPy wrote.
    """
    array = mx.zeros(shape, dtype, stream=mx.cpu)
    mx.eval(array)
    return array, np.array(array, copy=False)


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
        parts: The tensors that it consists of, along its first axis, if it is none of the file.
    """

    name: str
    file: Path
    dtype: mx.Dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    checksum: str | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None
    parts: tuple["TensorEntry", ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


def stacked(parts: Sequence[TensorEntry], name: str) -> TensorEntry:
    """Tensors of one shape and dtype as one, with an axis for them before the others.

    Args:
        parts: The tensors, one at least, perhaps of several files.
        name: What messages call it.
    """
    first, nbytes = parts[0], sum(part.nbytes for part in parts)
    shape, stop = (len(parts), *first.shape), first.start + nbytes
    return TensorEntry(name, first.file, first.dtype, shape, first.start, stop, parts=tuple(parts))


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
                if entry.parts:
                    whole = mx.stack([read_tensor(part) for part in entry.parts])
                    mx.eval(whole)
                    yield entry.name, whole
                    continue
                if entry.decode is None:
                    array, capacity = host_array(entry.shape, _UNSIGNED[entry.dtype.size])
                    memory = capacity.reshape(-1).view(np.uint8)
                else:
                    memory = np.empty(entry.nbytes, np.uint8)
                stream.seek(entry.start)
                if stream.readinto(memory.data) < len(memory):
                    raise _changed(entry, "ends inside")
                if entry.checksum is not None and checksum(memory) != entry.checksum:
                    raise _changed(entry, "has changed bytes in")
                if entry.decode is not None:
                    array = mx.array(entry.decode(memory))
                elif entry.dtype == mx.bool_:
                    array = array != 0
                yield entry.name, array.view(entry.dtype)
    except OSError as error:
        raise CheckpointError(f"[load] '{file}' cannot be read: {error}. {UNREADABLE}") from error


def checksum(data: np.ndarray) -> str:
    """The SHA-256 of some bytes, in hexadecimal digits."""
    return hashlib.sha256(data.data).hexdigest()


def _changed(entry: TensorEntry, problem: str) -> CheckpointError:
    return CheckpointError(
        f"[load] '{entry.file}' {problem} tensor {entry.name!r:.100}. The file is damaged; fetch or "
        "write it again."
    )


MAX_HEADER_BYTES = 16_000_000
MAX_DIMENSIONS = 8

DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}
UNREAD_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "C64": 64,
    "F64": 64,
}
"""The other types of the format, and the bits of a number."""


def _problem(file: Path, text: str) -> CheckpointError:
    return CheckpointError(
        f"[safetensors] '{file}' {text}. The file is damaged or not a safetensors file; fetch or "
        "write it again."
    )


def _entry(file: Path, name: str, info: Any, data_start: int, data_bytes: int) -> TensorEntry:
    if not isinstance(info, dict):
        raise _problem(
            file, f"must describe tensor {name!r:.100} by an object but got {info!r:.80}"
        )
    dtype, shape, offsets = (info.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES.keys() | UNREAD_BITS:
        raise _problem(
            file,
            f"must hold one of {', '.join(DTYPES)} in tensor {name!r:.100} but got {dtype!r:.80}",
        )
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
    ):
        raise _problem(file, f"gives tensor {name!r:.100} the impossible shape {shape!r:.80}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise _problem(file, f"gives tensor {name!r:.100} the impossible offsets {offsets!r:.80}")
    start, stop = offsets
    if stop > data_bytes:
        raise _problem(
            file, f"ends before tensor {name!r:.100}, at {data_bytes} of at least {stop} bytes"
        )
    bits = UNREAD_BITS[dtype] if dtype in UNREAD_BITS else 8 * DTYPES[dtype].size
    size = math.prod(shape) * bits // 8
    if stop - start != size:
        raise _problem(
            file, f"gives tensor {name!r:.100} {stop - start} bytes where {size} are needed"
        )
    if dtype in UNREAD_BITS:
        raise UnsupportedModelError(
            f"[safetensors] '{file}' holds {dtype} in tensor {name!r:.100}, which is not supported. "
            "Use a checkpoint with F32, F16 or BF16, or write it again with one of these by the program "
            "that made it."
        )
    span = data_start + start, data_start + stop
    return TensorEntry(name, file, DTYPES[dtype], tuple(shape), *span)


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads and checks the header of one file. No tensor is loaded.

    Returns:
        The tensors by their names, in the order of their data, and the metadata.

    Raises:
        CheckpointError: The file is missing, truncated or not well formed.
        UnsupportedModelError: A tensor has a type of the format that is not read.
    """
    if not file.exists():
        raise CheckpointError(
            f"[safetensors] '{file}' must be a file but is missing. Fetch it, or give the folder that "
            "holds it."
        )
    try:
        with open_file(file, is_member=True) as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise _problem(file, f"must have at least 8 bytes but has {file_bytes}")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _problem(
                    file,
                    f"claims a header of {length:,} bytes; {MAX_HEADER_BYTES:,} are allowed, and the "
                    f"file has {file_bytes:,}",
                )
            text, data_bytes = stream.read(length), file_bytes - 8 - length
    except OSError as error:
        raise CheckpointError(
            f"[safetensors] '{file}' cannot be read: {error}. {UNREADABLE}"
        ) from error
    header = parse_json_object(text, f"the header of '{file}'")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _problem(file, "must have text in '__metadata__'")
    start = 8 + len(text)
    entries = [_entry(file, name, info, start, data_bytes) for name, info in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 0
    for entry in entries:
        if entry.start < end:
            raise _problem(file, f"has tensor {entry.name!r:.100} overlapping another one")
        end = max(end, entry.stop)
    return {entry.name: entry for entry in entries}, metadata


def read_arrays(file: Path) -> dict[str, mx.array]:
    """All tensors of one file by their names.

    Raises:
        CheckpointError: The file is missing, damaged or not well formed.
    """
    entries, _ = read_header(file)
    return dict(read_tensors(file, entries.values()))


MAX_SHARD_BYTES = 5 * 10**9
METADATA = {"format": "mlx"}
HUB_METADATA = {"format": "pt"}
"""The metadata of files that are laid out as on the Hub, where mlx-lm has another layout."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor before it is made.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype.
        shape: Its shape.
    """

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True)
class PlannedTensors:
    """Tensors that are made together and are stored in one file.

    Attributes:
        specs: The descriptions of the tensors.
        make: Makes the tensors, in the same order.
    """

    specs: tuple[TensorSpec, ...]
    make: Callable[[], Sequence[mx.array]]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @classmethod
    def of(cls, name: str, array: mx.array) -> "PlannedTensors":
        """The plan of a tensor that is in memory already."""
        return cls((TensorSpec(name, array.dtype, array.shape),), lambda: (array,))


def write_safetensors(
    file: Path,
    plan: Iterable[PlannedTensors],
    metadata: Mapping[str, str] = METADATA,
    on_bytes: Callable[[int], object] | None = None,
) -> None:
    """Writes one file to the disk.

    Args:
        file: The file to make.
        plan: Its tensors, in their order in the file.
        metadata: Texts for the header.
        on_bytes: Called after each tensor with the number of its bytes.

    Raises:
        OSError: The file cannot be written.
    """
    groups = list(plan)
    with open(file, "wb") as stream:
        stream.write(file_head((spec for group in groups for spec in group.specs), metadata))
        for group in groups:
            for spec, array in zip(group.specs, group.make(), strict=True):
                if (array.dtype, array.shape) != (spec.dtype, spec.shape):
                    raise RuntimeError(
                        f"tensor {spec.name!r} was planned as {spec.dtype} {spec.shape} but is "
                        f"{array.dtype} {array.shape}"
                    )
                stream.write(tensor_bytes(array).data)
                if on_bytes is not None:
                    on_bytes(spec.nbytes)
            mx.clear_cache()


def file_head(specs: Iterable[TensorSpec], metadata: Mapping[str, str] = METADATA) -> bytes:
    """The header of a file; the bytes of its tensors follow, one after the other."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(array: mx.array) -> np.ndarray:
    """The bytes of an array, row by row, as `uint8` of one axis."""
    return np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8))


def write_shards(
    folder: Path,
    plan: Iterable[PlannedTensors],
    on_bytes: Callable[[int], object] | None = None,
    metadata: Mapping[str, str] = METADATA,
) -> None:
    """Writes a checkpoint's tensors as one file, or as several with an index.

    Args:
        folder: The folder of the checkpoint.
        plan: The tensors.
        on_bytes: As for `write_safetensors`.
        metadata: As for `write_safetensors`.
    """
    shards: list[list[PlannedTensors]] = [[]]
    size = 0
    for group in plan:
        if shards[-1] and size + group.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.nbytes
    if len(shards) == 1:
        write_safetensors(folder / WEIGHTS_FILE, shards[0], metadata, on_bytes)
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, metadata, on_bytes)
        file_of.update((spec.name, name) for group in shard for spec in group.specs)
    total = sum(group.nbytes for shard in shards for group in shard)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": file_of})

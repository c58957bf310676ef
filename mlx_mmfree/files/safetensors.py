"""Reads safetensors files from untrusted sources. The header is checked before any tensor is read.

A file holds the length of its header (8 bytes, little-endian), the header, which is a JSON object
`{name: {dtype, shape, data_offsets}}`, and the data. `mx.load` is not used: it hands out memory that
was never filled where a read fails.
"""

import math
import os
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, UnsupportedModelError
from .json_file import parse_json_object
from .opening import UNREADABLE, open_member
from .tensor_entry import TensorEntry, read_tensors

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


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


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
        or not all(_is_size(size) and size < 2**31 for size in shape)
    ):
        raise _problem(file, f"gives tensor {name!r:.100} the impossible shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
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
    places = data_start + start, data_start + stop
    return TensorEntry(name, file, DTYPES[dtype], tuple(shape), *places)


def _read_header_bytes(file: Path) -> tuple[bytes, int]:
    """The text of the header, and the number of bytes of the data."""
    if not file.exists():
        raise CheckpointError(
            f"[safetensors] '{file}' must be a file but is missing. Fetch it, or give the folder that "
            "holds it."
        )
    try:
        with open_member(file) as stream:
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
            return stream.read(length), file_bytes - 8 - length
    except OSError as error:
        raise CheckpointError(
            f"[safetensors] '{file}' cannot be read: {error}. {UNREADABLE}"
        ) from error


def read_header(file: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Reads and checks the header of one file. No tensor is loaded.

    Returns:
        The tensors by their names, in the order of their data, and the metadata.

    Raises:
        CheckpointError: The file is missing, truncated or not well formed.
        UnsupportedModelError: A tensor has a type of the format that is not read.
    """
    text, data_bytes = _read_header_bytes(file)
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

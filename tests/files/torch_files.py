"""Writes PyTorch checkpoints byte by byte, sound or not, without torch."""

import json
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

STORAGE_NAMES = {
    mx.bool_: "BoolStorage",
    mx.uint8: "ByteStorage",
    mx.int8: "CharStorage",
    mx.int16: "ShortStorage",
    mx.int32: "IntStorage",
    mx.int64: "LongStorage",
    mx.float16: "HalfStorage",
    mx.bfloat16: "BFloat16Storage",
    mx.float32: "FloatStorage",
}


@dataclass(frozen=True)
class Global:
    """A name that a pickle asks for."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of something that a pickle names."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Reference:
    """A persistent id."""

    value: Any


@dataclass(frozen=True)
class ZipPart:
    """An entry of a zip file and what its headers say about it."""

    name: str
    content: bytes
    method: int = 0
    flags: int = 0x0808
    crc: int | None = None
    size: int | None = None
    local_name: str | None = None
    start: int | None = None


def opcodes(value: Any) -> bytes:
    """A value in the instructions of pickle's protocol 2, without a memo."""
    if isinstance(value, bool | int | float | str | None):
        # without the frame of the protocol: its start and the final instruction
        return _plain(value)
    if isinstance(value, tuple | list):
        items = b"".join(map(opcodes, value))
        return b"(" + items + b"t" if isinstance(value, tuple) else b"](" + items + b"e"
    if isinstance(value, dict):
        items = b"".join(opcodes(key) + opcodes(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, Global):
        module, _, name = value.name.rpartition(".")
        return f"c{module}\n{name}\n".encode()
    if isinstance(value, Call):
        return opcodes(Global(value.name)) + opcodes(value.arguments) + b"R"
    return opcodes(value.value) + b"Q"


def _plain(value: bool | int | float | str | None) -> bytes:
    text = pickle.dumps(value, protocol=2)[2:-1]
    # the pickler of strings also stores them in its memo
    return text[:-2] if isinstance(value, str) else text


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def tensor(
    shape: Any,
    *,
    key: Any = "0",
    offset: Any = 0,
    strides: Any = None,
    size: Any = None,
    kind: Any = "FloatStorage",
    metadata: Any = None,
) -> Call:
    """The description of a tensor; by default it is contiguous."""
    if strides is None:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    size = math.prod(shape) if size is None else size
    storage = Reference(("storage", Global(f"torch.{kind}"), key, "cpu", size))
    arguments = (storage, offset, shape, strides, False, Call("collections.OrderedDict", ()))
    more = () if metadata is None else (metadata,)
    return Call("torch._utils._rebuild_tensor_v2", (*arguments, *more))


def write_zip(file: Path, parts: Iterable[ZipPart], *, is_64: bool = False) -> None:
    """Writes a zip file; with `is_64`, sizes and offsets are given in 64 bits."""
    body, directory, count = b"", b"", 0
    for part in parts:
        content, count = part.content, count + 1
        crc = zlib.crc32(content) if part.crc is None else part.crc
        size = len(content) if part.size is None else part.size
        start = len(body) if part.start is None else part.start
        name, local_name = part.name.encode(), (part.local_name or part.name).encode()
        local = (b"PK\x03\x04", 0, part.flags, part.method, 0, 0, 0, 0, 0, len(local_name), 5)
        body += struct.pack("<4s5H3I2H", *local) + local_name + b"FB\1\0Z" + content
        extra = struct.pack("<2H3Q", 1, 24, size, size, start) if is_64 else b""
        sizes = (2**32 - 1, 2**32 - 1) if is_64 else (size, size)
        head = (b"PK\1\2", 0, 0, part.flags, part.method, 0, 0, crc, *sizes, len(name), len(extra))
        offset = 2**32 - 1 if is_64 else start
        directory += struct.pack("<4s6H3I5H2I", *head, 0, 0, 0, 0, offset) + name + extra
    end = (count, count, len(directory), len(body))
    tail = b""
    if is_64:
        tail = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0, 0, 0, 0, *end)
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, len(body) + len(directory), 1)
        end = (2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1)
    tail += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *end, 0)
    file.write_bytes(body + directory + tail)


def read_parts(file: Path) -> list[ZipPart]:
    """The entries of a sound zip file."""
    with zipfile.ZipFile(file) as container:
        return [ZipPart(name, container.read(name)) for name in container.namelist()]


def torch_parts(
    description: Any, storages: Mapping[str, bytes], byteorder: bytes = b"little"
) -> list[ZipPart]:
    """The entries that `torch.save` writes."""
    text = description if isinstance(description, bytes) else pickled(description)
    return [
        ZipPart("model/data.pkl", text),
        ZipPart("model/byteorder", byteorder),
        *(ZipPart(f"model/data/{key}", content) for key, content in storages.items()),
        ZipPart("model/version", b"3\n"),
        ZipPart("model/.data/serialization_id", b"1"),
    ]


def write_torch(file: Path, tensors: Mapping[str, mx.array]) -> None:
    """Writes tensors as `torch.save` does, each with a storage of its own."""
    description, storages = {}, {}
    for number, (name, array) in enumerate(tensors.items()):
        key = str(number)
        storages[key] = bytes_of(array)
        description[name] = tensor(array.shape, key=key, kind=STORAGE_NAMES[array.dtype])
    write_zip(file, torch_parts(description, storages))


def bytes_of(array: mx.array) -> bytes:
    return np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


def to_torch_checkpoint(folder: Path, *, shards: int = 1) -> Path:
    """Rewrites the safetensors of a checkpoint folder as one or more PyTorch files."""
    [source] = folder.glob("*.safetensors")
    tensors = dict(mx.load(str(source)))
    mx.eval(tensors)
    source.unlink()
    if shards == 1:
        write_torch(folder / "pytorch_model.bin", tensors)
        return folder
    file_of = {}
    for shard in range(shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        names = sorted(tensors)[shard::shards]
        write_torch(folder / file, {name: tensors[name] for name in names})
        file_of.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def change_part(parts: list[ZipPart], name: str, /, **changes: Any) -> list[ZipPart]:
    """The same entries with other fields in one."""
    return [replace(part, **changes) if part.name == name else part for part in parts]

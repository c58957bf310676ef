"""Reads PyTorch checkpoints (`.bin`, written by `torch.save`) from untrusted sources, without torch.

A checkpoint is a zip file. Its entry `<name>/data.pkl` is a pickle that describes the tensors, and each
entry `<name>/data/<key>` holds the numbers of one storage, little-endian.

Nothing is unpacked: an entry is a range of bytes of the file, which Python's `zipfile` does not tell. Of
the format (APPNOTE.TXT by PKWARE) only what PyTorch writes is read: no compression, no encryption, no
comment, no parts.

Pickle is a language for a stack machine. Python's own machine imports and calls whatever a file names.
The machine here knows a few names, gives each a meaning of its own, and calls nothing. It can only build
dictionaries of tensors.
"""

import math
import os
import pickletools
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .reading import UNREADABLE, open_file
from .tensors import TensorEntry

MAX_DIRECTORY_BYTES = 8_000_000

# signature, this disk, directory's disk, entries here, entries, directory bytes, start, comment
_END = struct.Struct("<4s4H2IH")
# signature, record bytes, made by, needed, disk, disk, entries here, entries, directory bytes, start
_END_64 = struct.Struct("<4sQ2H2I4Q")
# signature, disk, start of the record above, disks
_LOCATOR_64 = struct.Struct("<4sIQI")
# signature, made by, needed, flags, method, time, date, crc, stored bytes, bytes, name bytes,
# extra bytes, comment bytes, disk, attributes, attributes, start of the local header
_ENTRY = struct.Struct("<4s6H3I5H2I")
# signature, needed, flags, method, time, date, crc, stored bytes, bytes, name bytes, extra bytes
_LOCAL = struct.Struct("<4s5H3I2H")

_ENCRYPTED = 0x2041
_ELSEWHERE = 0xFFFFFFFF
_EXTRA_64 = 1


@dataclass(frozen=True)
class ZipEntry:
    """A file inside a zip file.

    Attributes:
        name: Its path, with `/` between the parts.
        start: The first byte of its content, counted from the start of the zip file.
        nbytes: The number of bytes of its content.
        crc: The CRC-32 of its content. Whoever reads the content compares it.
    """

    name: str
    start: int
    nbytes: int
    crc: int


def read_directory(file: Path, stream: BinaryIO) -> dict[str, ZipEntry]:
    """The entries of a zip file by their names.

    Args:
        file: The path of the file, for messages.
        stream: The open file.

    Raises:
        CheckpointError: The file is not a zip file, or has entries that are compressed, encrypted, named
            twice, overlapping, or named by a path that leads elsewhere.
        OSError: The file cannot be read.
    """
    try:
        return _read_directory(stream)
    except (ValueError, struct.error) as error:
        text = "ends too early" if isinstance(error, struct.error) else error
        raise CheckpointError(
            f"[zip] '{file}' {text}. The file is damaged or was not written by torch.save; fetch or "
            "write it again."
        ) from error


def _read_directory(stream: BinaryIO) -> dict[str, ZipEntry]:
    count, start, nbytes = _find_directory(stream)
    if nbytes > MAX_DIRECTORY_BYTES or count * _ENTRY.size > nbytes:
        raise ValueError(f"claims {count} entries in a directory of {nbytes} bytes")
    stream.seek(start)
    directory = stream.read(nbytes)
    entries: dict[str, ZipEntry] = {}
    position = 0
    for _ in range(count):
        name, local_start, size, crc, position = _read_entry(directory, position)
        if name in entries:
            raise ValueError(f"names entry {name!r:.100} twice")
        content_start = _content_start(stream, name, local_start)
        entries[name] = ZipEntry(name, content_start, size, crc)
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.start):
        if entry.start < end or entry.start + entry.nbytes > start:
            raise ValueError(f"has entry {entry.name!r:.100} overlapping others")
        end = entry.start + entry.nbytes
    return entries


def _find_directory(stream: BinaryIO) -> tuple[int, int, int]:
    """The number of entries, and where the directory starts and how many bytes it has."""
    end_start = stream.seek(0, os.SEEK_END) - _END.size
    if end_start < 0:
        raise ValueError("is too short for a zip file")
    signature, disk, _, here, count, nbytes, start, comment = _unpack(stream, _END, end_start)
    if signature != b"PK\x05\x06" or comment or disk or here != count:
        raise ValueError("does not end as a zip file in one part does")
    if _LOCATOR_64.size <= end_start:
        locator = _unpack(stream, _LOCATOR_64, end_start - _LOCATOR_64.size)
        if locator[0] == b"PK\x06\x07":
            end_start = locator[2]
            record = _unpack(stream, _END_64, end_start)
            if record[0] != b"PK\x06\x06" or record[6] != record[7]:
                raise ValueError("has an unsound zip64 directory")
            count, nbytes, start = record[7:]
    if start + nbytes > end_start:
        raise ValueError("has its directory outside of the file")
    return count, start, nbytes


def _unpack(stream: BinaryIO, layout: struct.Struct, start: int) -> tuple:
    if start >= 2**63:
        raise ValueError("points outside of the file")
    stream.seek(start)
    return layout.unpack(stream.read(layout.size))


def _read_entry(directory: bytes, position: int) -> tuple[str, int, int, int, int]:
    """Name, start of the local header, size and CRC of an entry, and where the next entry begins."""
    fields = _ENTRY.unpack_from(directory, position)
    signature, flags, method, crc, stored, size = (fields[k] for k in (0, 3, 4, 7, 8, 9))
    name_start = position + _ENTRY.size
    extra_start = name_start + fields[10]
    next_position = extra_start + fields[11] + fields[12]
    if signature != b"PK\x01\x02" or next_position > len(directory):
        raise ValueError("has an unsound directory")
    name = directory[name_start:extra_start].decode(errors="backslashreplace")
    if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"has an entry with the path {name!r:.100}, which may lead elsewhere")
    if method or flags & _ENCRYPTED:
        raise ValueError(
            f"has entry {name!r:.100} compressed or encrypted, which torch.save never does"
        )
    extra = directory[extra_start : extra_start + fields[11]]
    size, stored, start = _resolve_64(extra, [size, stored, fields[16]])
    if stored != size:
        raise ValueError(f"gives entry {name!r:.100} {stored} bytes for a content of {size}")
    return name, start, size, crc, next_position


def _resolve_64(extra: bytes, values: list[int]) -> list[int]:
    """Replaces the values that do not fit into 32 bits by the values of the zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, position)
        if kind == _EXTRA_64:
            for index, value in enumerate(values):
                if value == _ELSEWHERE:
                    (values[index],) = struct.unpack_from("<Q", extra, position + 4)
                    position += 8
            return values
        position += 4 + nbytes
    return values


def _content_start(stream: BinaryIO, name: str, start: int) -> int:
    fields = _unpack(stream, _LOCAL, start)
    signature, method, name_bytes, extra_bytes = (fields[k] for k in (0, 3, 9, 10))
    if signature != b"PK\x03\x04" or method or stream.read(name_bytes) != name.encode():
        raise ValueError(f"has entry {name!r:.100} in two records that disagree")
    return start + _LOCAL.size + name_bytes + extra_bytes


MAX_PICKLE_BYTES = 4_000_000
MAX_DIMENSIONS = 8

STORAGES: Mapping[str, mx.Dtype] = {
    "torch.BoolStorage": mx.bool_,
    "torch.ByteStorage": mx.uint8,
    "torch.CharStorage": mx.int8,
    "torch.ShortStorage": mx.int16,
    "torch.IntStorage": mx.int32,
    "torch.LongStorage": mx.int64,
    "torch.HalfStorage": mx.float16,
    "torch.BFloat16Storage": mx.bfloat16,
    "torch.FloatStorage": mx.float32,
}
_DICTIONARY = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_UNREAD = ("torch.DoubleStorage", "torch.ComplexFloatStorage", "torch.ComplexDoubleStorage")
_GLOBALS = (_DICTIONARY, _TENSOR, _PARAMETER, *STORAGES)

_MAX_STACK = 100_000
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


@dataclass(frozen=True)
class Storage:
    """The numbers that one or several tensors are views of.

    Attributes:
        key: Its name in the zip file.
        dtype: Its MLX dtype.
        size: How many numbers it holds.
    """

    key: str
    dtype: mx.Dtype
    size: int


@dataclass(frozen=True)
class View:
    """A tensor: a strided view of a storage.

    Attributes:
        storage: The storage.
        offset: The index of its first number in the storage.
        shape: Its shape.
        strides: The distance of neighbours along each axis, in numbers.
        is_negated: Whether the storage has the numbers with the other sign.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_negated: bool = False

    @property
    def span(self) -> int:
        """How many numbers it spans from its first to its last one; 0 if it is empty."""
        if not math.prod(self.shape):
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)


@dataclass(frozen=True)
class _Global:
    name: str


def read_views(text: bytes) -> dict[str, View]:
    """The tensors that a pickle describes, by their names.

    Raises:
        ValueError: The pickle is not well formed, or asks for anything but a flat dictionary of tensors
            that lie within their storages.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(text):
            machine.step(opcode.name, argument)
        result = machine.stack.pop()
    except (IndexError, KeyError) as error:
        raise ValueError("has a pickle that is not well formed") from error
    if not isinstance(result, dict):
        raise ValueError(f"must hold a dictionary of tensors but holds a {type(result).__name__}")
    for name, value in result.items():
        if not isinstance(value, View):
            raise ValueError(
                f"must hold a tensor under {name!r:.100} but holds a {type(value).__name__}"
            )
    return result


class _Machine:
    """The stack machine. Each instruction that it knows is a method `do_...`.

    It raises `IndexError` or `KeyError` where a pickle takes something that is not on the stack or in
    the memo.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._mark_positions: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._push(argument)
        elif name in _CONSTANTS:
            self._push(_CONSTANTS[name])
        elif name in _TUPLES:
            self._push(tuple(self._pop(_TUPLES[name])))
        elif name in _PUTS:
            self._memo[argument] = self.stack[-1]
        elif name in _GETS:
            self._push(self._memo[argument])
        elif hasattr(self, f"do_{name.lower()}"):
            getattr(self, f"do_{name.lower()}")(argument)
        else:
            raise ValueError(f"uses the pickle instruction {name}, which tensors do not need")

    def _push(self, value: Any) -> None:
        if len(self.stack) >= _MAX_STACK:
            raise ValueError("has a pickle that needs too much memory")
        self.stack.append(value)

    def _pop(self, count: int) -> list[Any]:
        if self._mark_positions and len(self.stack) - count < self._mark_positions[-1]:
            raise IndexError
        values = [self.stack.pop() for _ in range(count)]
        return values[::-1]

    def _pop_to_mark(self) -> list[Any]:
        mark = self._mark_positions.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def do_proto(self, version: int) -> None:
        pass

    def do_frame(self, nbytes: int) -> None:
        pass

    def do_stop(self, _: None) -> None:
        if self._mark_positions or len(self.stack) != 1:
            raise IndexError

    def do_mark(self, _: None) -> None:
        if len(self._mark_positions) >= _MAX_STACK:
            raise ValueError("has a pickle that needs too much memory")
        self._mark_positions.append(len(self.stack))

    def do_memoize(self, _: None) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def do_empty_dict(self, _: None) -> None:
        self._push({})

    def do_empty_list(self, _: None) -> None:
        self._push([])

    def do_append(self, _: None) -> None:
        self._extend(self._pop(1))

    def do_appends(self, _: None) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise IndexError
        self.stack[-1].extend(values)

    def do_tuple(self, _: None) -> None:
        self._push(tuple(self._pop_to_mark()))

    def do_setitem(self, _: None) -> None:
        self._update(self._pop(2))

    def do_setitems(self, _: None) -> None:
        self._update(self._pop_to_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise IndexError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise ValueError(f"must name tensors by text but uses a {type(key).__name__}")
            if key in target:
                raise ValueError(f"names tensor {key!r:.100} twice")
            target[key] = value

    def do_global(self, names: str) -> None:
        self._push_global(".".join(names.split(" ", 1)))

    def do_stack_global(self, _: None) -> None:
        module, name = self._pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise IndexError
        self._push_global(f"{module}.{name}")

    def _push_global(self, name: str) -> None:
        if name in _UNREAD:
            raise ValueError(
                f"holds numbers of the type {name}, which is not supported; convert them to float32"
            )
        if name not in _GLOBALS:
            raise ValueError(
                f"asks for {name!r:.100}, which is not needed for tensors of a known type and is "
                "refused"
            )
        self._push(_Global(name))

    def do_binpersid(self, _: None) -> None:
        [value] = self._pop(1)
        if not isinstance(value, tuple) or len(value) != 5 or value[0] != "storage":
            raise ValueError("has a reference that is not to a storage")
        _, kind, key, _, size = value
        dtype = STORAGES.get(kind.name) if isinstance(kind, _Global) else None
        if dtype is None or not isinstance(key, str) or not _is_size(size):
            raise ValueError("has a storage that is not well described")
        self._push(Storage(key, dtype, size))

    def do_reduce(self, _: None) -> None:
        called, arguments = self._pop(2)
        if not isinstance(called, _Global) or not isinstance(arguments, tuple):
            raise IndexError
        if called.name == _DICTIONARY and not arguments:
            self._push({})
        elif called.name == _TENSOR and len(arguments) in (6, 7):
            self._push(_view(*arguments[:4], is_negated=_is_negated(*arguments[6:])))
        elif called.name == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], View):
            self._push(arguments[0])
        else:
            raise ValueError(f"has odd arguments of {called.name!r}")

    def do_build(self, _: None) -> None:
        # the attribute `_metadata` of a state dictionary holds the versions of its modules
        self._pop(1)
        if not isinstance(self.stack[-1], dict):
            raise ValueError("sets attributes of something that has none")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_negated(metadata: object = None) -> bool:
    """Returns whether PyTorch turns the signs of a view when it is read, its "negative bit"."""
    given = {} if metadata is None else metadata
    if not isinstance(given, dict) or given.keys() - {"neg"}:
        raise ValueError(f"describes a tensor by {metadata!r:.80}, which is not known")
    return bool(given.get("neg"))


def _view(
    storage: object, offset: object, shape: object, strides: object, *, is_negated: bool
) -> View:
    if (
        not isinstance(storage, Storage)
        or not isinstance(offset, int)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or len(shape) != len(strides)
        or len(shape) > MAX_DIMENSIONS
        or not all(map(_is_size, (offset, *shape, *strides)))
        or any(size >= 2**31 for size in shape)
        or math.prod(size or 1 for size in shape) >= 2**48
    ):
        raise ValueError("has a tensor with an impossible shape, strides or offset")
    count = math.prod(shape)
    # an empty tensor may have any offset, and an axis of one number any stride; neither is used
    steps = (
        stride if count and size > 1 else 0 for size, stride in zip(shape, strides, strict=True)
    )
    view = View(storage, offset if count else 0, shape, tuple(steps), is_negated)
    if count and max(count, offset + view.span) > storage.size:
        raise ValueError(
            f"has a tensor of shape {shape} that needs more than the {storage.size} numbers of its "
            "storage"
        )
    return view


_PICKLE = "data.pkl"
_LEGACY_START = b"\x80"
_CHUNK_BYTES = 16_000_000
_HINT = (
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
        with open_file(file, is_member=True) as stream:
            if stream.read(1) == _LEGACY_START:
                raise CheckpointError(
                    f"[torch] '{file}' must be a zip file but is a bare pickle, as PyTorch wrote "
                    f"before version 1.6. {_HINT}."
                )
            entries = read_directory(file, stream)
            try:
                return _read_entries(file, stream, entries)
            except ValueError as error:
                raise CheckpointError(f"[torch] '{file}' {error}. {_HINT}.") from error
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
    if view.storage.dtype == mx.bool_:
        return numbers != 0
    if not view.is_negated:
        return numbers
    if not mx.issubdtype(view.storage.dtype, mx.floating):
        return -numbers
    # the highest bit of a float is its sign
    return numbers ^ numbers.dtype.type(1 << (8 * itemsize - 1))


def _read(stream: BinaryIO, entry: ZipEntry) -> bytes:
    """The content of a small entry."""
    _check(stream, entry)
    stream.seek(entry.start)
    return stream.read(entry.nbytes)


def _check(stream: BinaryIO, entry: ZipEntry) -> None:
    """Compares an entry with its checksum, chunk by chunk."""
    stream.seek(entry.start)
    crc, remaining = 0, entry.nbytes
    while remaining:
        chunk = stream.read(min(remaining, _CHUNK_BYTES))
        if not chunk:
            break
        crc, remaining = zlib.crc32(chunk, crc), remaining - len(chunk)
    if remaining or crc != entry.crc:
        raise ValueError(f"has missing or changed bytes in its entry {entry.name!r:.100}")

"""Reads the directory of an uncompressed zip file from an untrusted source.

Nothing is unpacked: an entry is a range of bytes of the file, which Python's `zipfile` does not tell. Of
the format (APPNOTE.TXT by PKWARE) only what PyTorch writes is read: no compression, no encryption, no
comment, no parts.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...errors import CheckpointError

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
    """Replaces the values that do not fit into 32 bits by those of the zip64 field."""
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
        raise ValueError(f"has entry {name!r:.100} at two places that disagree")
    return start + _LOCAL.size + name_bytes + extra_bytes

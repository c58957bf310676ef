"""Finds and changes the addresses through which a loaded ELF library calls functions of others."""

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PT_LOAD, PT_DYNAMIC = 1, 2
DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL, DT_PLTRELSZ = 5, 6, 7, 8, 23, 2
PROT_READ, PROT_WRITE = 1, 2
# ELF machine number, and its relocation types (GLOB_DAT, JUMP_SLOT) by platform.machine()
RELOCATIONS = {"x86_64": (62, (6, 7)), "aarch64": (183, (1025, 1026))}


class Slot(NamedTuple):
    """One imported symbol of a loaded library and the address of its relocation slot."""

    symbol: str
    address: int
    is_writable: bool


def imported_slots(library: str) -> Iterator[Slot]:
    """Yields the functions that a loaded ELF library imports, with their relocation slots.

    Args:
        library: The file name of the library, such as `libmlx.so`.
    """
    machine, types = RELOCATIONS[platform.machine()]
    regions = _mapped_regions(library)
    if not regions:
        return
    start = regions[0][0]
    header = ctypes.string_at(start, 64)
    if header[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", header, 18)[0] != machine:
        return
    base, dynamic = _dynamic_table(start, header)
    symbol_table, strings = dynamic[DT_SYMTAB], dynamic[DT_STRTAB]
    for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        if table not in dynamic:
            continue
        entries = ctypes.string_at(dynamic[table], dynamic[size])
        for offset, info, _ in struct.iter_unpack("<QQq", entries):
            if info & 0xFFFFFFFF in types:
                name_offset = ctypes.c_uint32.from_address(symbol_table + 24 * (info >> 32)).value
                name = ctypes.string_at(strings + name_offset).decode()
                address = base + offset
                writable = any(low <= address < high and w for low, high, w in regions)
                yield Slot(name, address, writable)


def _mapped_regions(library: str) -> list[tuple[int, int, bool]]:
    """Start, end and whether it is writable, of every mapping of a library, lowest first."""
    regions = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and Path(fields[5].removesuffix(" (deleted)")).name == library:
            low, high = (int(address, 16) for address in fields[0].split("-"))
            regions.append((low, high, "w" in fields[1]))
    return sorted(regions)


def _dynamic_table(start: int, header: bytes) -> tuple[int, dict[int, int]]:
    """The load base, and the dynamic section with its pointers as absolute addresses."""
    offset = struct.unpack_from("<Q", header, 32)[0]
    size, count = struct.unpack_from("<HH", header, 54)
    segments = [
        struct.unpack("<IIQQQQQQ", ctypes.string_at(start + offset + i * size, 56))
        for i in range(count)
    ]
    base = start - next(s[3] for s in segments if s[0] == PT_LOAD)
    segment = next(s for s in segments if s[0] == PT_DYNAMIC)
    dynamic = dict(struct.iter_unpack("<qQ", ctypes.string_at(base + segment[3], segment[6])))
    for tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL):
        # glibc stores absolute addresses here; other loaders leave them relative
        if tag in dynamic and dynamic[tag] < base:
            dynamic[tag] += base
    return base, dynamic


def function_address(function: object) -> int:
    """The address of a function that ctypes looked up."""
    return ctypes.c_size_t.from_buffer(function).value  # type: ignore[arg-type]


def write_slot(slot: Slot, function: int) -> None:
    """Points a relocation slot to a function, and lifts the page's write protection for that moment."""
    page = slot.address & -mmap.PAGESIZE
    if not slot.is_writable:
        _protect(page, PROT_READ | PROT_WRITE)
    ctypes.c_uint64.from_address(slot.address).value = function
    if not slot.is_writable:
        _protect(page, PROT_READ)


def _protect(page: int, protection: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mprotect: {os.strerror(number)}")

"""A fast BLAS and LAPACK for MLX on Linux.

MLX's Linux wheel is linked to the reference BLAS. `bind` points the BLAS and LAPACK imports of the
loaded `libmlx.so` to OpenBLAS (the package `scipy-openblas32`). It writes the addresses into the
library's relocation slots, so that the order of imports does not matter. Only products of 32- and 64-bit
floats become faster. `MLX_MMFREE_BLAS=0` switches it off; `threads` says how many threads compute.

In the middle of a product, OpenBLAS's own threads wait for each other in a busy loop: beside other busy
programs, two threads were up to 30 times slower than one. Where the compiled kernels can be used,
`share` gives OpenBLAS one thread, and the threads of the kernels compute chunks of each product.
"""

import ctypes
import mmap
import os
import platform
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .threads import thread_count

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


SWITCH = "MLX_MMFREE_BLAS"
CORE_TYPE = "OPENBLAS_CORETYPE"
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
PREFIX = "scipy_"
BLAS_NAME = re.compile(r"cblas_\w+|[a-z0-9]+_")


class Binding(NamedTuple):
    """The result of `bind`.

    Attributes:
        symbols: The functions that `libmlx.so` imports and that now lead to OpenBLAS.
        reason: Why there are none, or an empty string.
        is_needed: Whether MLX computes dense products slowly because there are none.
    """

    symbols: tuple[str, ...]
    reason: str = ""
    is_needed: bool = False


_binding: Binding | None = None


def bind() -> Binding:
    """Lets MLX compute its dense products with OpenBLAS where it would use the reference BLAS.

    It warns once if that is needed and cannot be done. Calling it again does nothing.

    Returns:
        The functions that were bound, or the reason why there are none.
    """
    global _binding
    if _binding is None:
        _binding = _bind()
        if _binding.is_needed:
            warnings.warn(
                f"[mlx_mmfree] MLX keeps its slow reference BLAS: {_binding.reason}. "
                f"Set {SWITCH}=0 to silence this.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _binding


def _bind() -> Binding:
    if sys.platform != "linux":
        return Binding((), "only MLX on Linux needs it")
    if os.environ.get(SWITCH) == "0":
        return Binding((), f"switched off by {SWITCH}=0")
    if mx.default_device() != mx.Device(mx.cpu):
        return Binding((), "the default device is not the CPU")
    if platform.machine() not in RELOCATIONS:
        return Binding((), f"not written for {platform.machine()} processors", is_needed=True)
    try:
        openblas = load_openblas()
    except (ImportError, OSError) as error:
        return Binding((), f"scipy-openblas32 does not load ({error})", is_needed=True)
    symbols = []
    for slot in imported_slots("libmlx.so"):
        if BLAS_NAME.fullmatch(slot.symbol) and hasattr(openblas, PREFIX + slot.symbol):
            write_slot(slot, function_address(openblas[PREFIX + slot.symbol]))
            symbols.append(slot.symbol)
    if "cblas_sgemm" not in symbols:
        return Binding((), "libmlx.so imports no BLAS that could be rebound", is_needed=True)
    openblas[PREFIX + "openblas_set_num_threads"](thread_count())
    return Binding(tuple(sorted(symbols)))


def share(share_products: Callable[[int, int], tuple[int, int]]) -> None:
    """Lets other threads than OpenBLAS's own compute MLX's products, if OpenBLAS computes them.

    Args:
        share_products: Takes the addresses of OpenBLAS's `cblas_sgemm` and `cblas_dgemm`, and returns
            the addresses of the functions that MLX is to call instead.
    """
    if not bind().symbols:
        return
    openblas = load_openblas()
    names = ("cblas_sgemm", "cblas_dgemm")
    shared = share_products(*(function_address(openblas[PREFIX + name]) for name in names))
    openblas[PREFIX + "openblas_set_num_threads"](1)
    addresses = dict(zip(names, shared, strict=True))
    for slot in imported_slots("libmlx.so"):
        if slot.symbol in addresses:
            write_slot(slot, addresses[slot.symbol])


def load_openblas() -> ctypes.CDLL:
    """Loads the OpenBLAS of the package scipy-openblas32, whose symbols start with `scipy_`."""
    import scipy_openblas32

    name = scipy_openblas32.get_library(fullname=True)
    with _core_type():
        return ctypes.CDLL(str(Path(scipy_openblas32.get_lib_dir(), name)))


@contextmanager
def _core_type() -> Iterator[None]:
    """Names OpenBLAS's kernels while the block loads it, since OpenBLAS may not know the processor.

    On an unknown processor OpenBLAS takes its AVX2 kernels. Those for AVX-512 are twice as fast where
    the processor has it.
    """
    if CORE_TYPE in os.environ or not _processor_flags() >= AVX512:
        yield
        return
    os.environ[CORE_TYPE] = "SKYLAKEX"
    try:
        yield
    finally:
        del os.environ[CORE_TYPE]


def _processor_flags() -> set[str]:
    """The instruction sets of an x86 processor; empty on other processors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())

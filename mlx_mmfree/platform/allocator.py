"""The C allocator of MLX's CPU arrays on Linux."""

import ctypes
import os
import sys

# the parameters of mallopt(3)
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = 1, -1, -2, -4, -8
_NEVER = -1
_GROWTH_BYTES = 64 * 2**20
# madvise(2)
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process keep the memory of freed arrays for the next ones.

    By default glibc returns large blocks to the kernel at once, and the kernel clears every page again
    when the next array touches it. That takes about a third of the time of a training step or of reading
    a long prompt. glibc also keeps freed small blocks apart and joins them whenever a large block comes
    or goes. That takes a quarter of the time in which MLX prepares to decode a token.

    The blocks lie side by side then, so that the kernel can hold them in pages of 2 MB, for which it is
    asked. A processor looks up the address of each page that it reads, and decoding reads all weights
    for every token. With pages of 4 KB, a token of a 2B model takes a tenth longer. This holds for what
    is allocated after the call.

    With these settings the process holds its peak memory to the end, so they are for a program that does
    one long job.

    Returns:
        Whether the C library took the settings; `False` where it is not glibc.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MXFAST, 0),
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _NEVER),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    has_taken = all([bool(mallopt(name, value)) for name, value in settings])
    _ask_for_large_pages(library)
    return has_taken


def _ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Asks for them wherever the heap will grow to, of which nothing is taken yet.

    A kernel that does not promise so much memory gives a smaller heap or none, which is not asked again.
    """
    library.malloc.restype = ctypes.c_void_p
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    block = library.malloc(ctypes.c_size_t(size))
    if block is None:
        return
    start = -(-block // _LARGE_PAGE) * _LARGE_PAGE
    end = (block + size) // _LARGE_PAGE * _LARGE_PAGE
    library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    library.free(ctypes.c_void_p(block))


def return_freed_memory() -> None:
    """Gives the kernel what was freed, so that resident memory is what is in use; only with glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)

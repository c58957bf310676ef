"""The C allocator of MLX's CPU arrays on Linux."""

import ctypes
import sys

# the parameters of mallopt(3)
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = 1, -1, -2, -4, -8
_LARGE_BYTES = 2**31 - 1
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process keep the memory of freed arrays for the next ones.

    By default glibc returns large blocks to the kernel at once, and the kernel clears every page again
    when the next array touches it. That takes about a third of the time of a training step or of reading
    a long prompt. glibc also keeps freed small blocks apart and joins them whenever a large block comes
    or goes. That takes a quarter of the time in which MLX prepares to decode a token.

    With these settings the process holds its peak memory to the end, so they are for a program that does
    one long job.

    Returns:
        Whether the C library took the settings; `False` where it is not glibc.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MXFAST, 0),
        (_M_ARENA_MAX, 1),
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _LARGE_BYTES),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    return all([bool(mallopt(name, value)) for name, value in settings])


def return_freed_memory() -> None:
    """Gives the kernel what was freed, so that resident memory is what is in use; only with glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)

"""How fast the default device reads memory."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .device import available_memory_bytes
from .threads import thread_count

BUFFER_BYTES = 512 * 2**20
PASSES = 5


@dataclass(frozen=True)
class Bandwidth:
    """The measured rate of plain reads.

    Attributes:
        bytes_per_second: The fastest pass.
        method: How it was measured, in words.
    """

    bytes_per_second: float
    method: str


def read_bandwidth(buffer_bytes: int = BUFFER_BYTES) -> Bandwidth:
    """Reads a buffer a few times on the default device; takes seconds at most.

    The rate is that of the memory only if the buffer is larger than the caches.

    Args:
        buffer_bytes: Size of the buffer, at most; a quarter of the available memory limits it.
    """
    available = available_memory_bytes()
    size = buffer_bytes if available is None else min(buffer_bytes, available // 4)
    words = max(size // 4, 1)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    fastest, readers = (_cpu_seconds if on_cpu else _gpu_seconds)(words)
    method = f"largest word of {4 * words / 2**20:.0f} MiB by {readers}, fastest of {PASSES} passes"
    return Bandwidth(4 * words / fastest, method)


def _cpu_seconds(words: int) -> tuple[float, str]:
    # MLX reduces on one thread, too slow to be limited by the memory
    threads = min(thread_count(), words)
    parts = np.array_split(np.full(words, 1, np.uint32), threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _fastest(lambda: list(pool.map(np.max, parts)))
    return seconds, f"NumPy on {threads} thread{'s' if threads > 1 else ''}"


def _gpu_seconds(words: int) -> tuple[float, str]:
    buffer = mx.full((words,), 1, mx.uint32)
    mx.eval(buffer)
    return _fastest(lambda: mx.eval(buffer.max())), "MLX on the GPU"


def _fastest(read: Callable[[], object]) -> float:
    """Returns the seconds of the fastest pass after one that does not count."""
    read()
    passes = []
    for _ in range(PASSES):
        start = time.perf_counter()
        read()
        passes.append(time.perf_counter() - start)
    return min(passes)

"""Measures how long reading arrays takes, which is the least time for an operation that reads them."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .gpu_time import queued_seconds
from .threads import thread_count

METHOD_ON_CPU = "NumPy's maximum over the buffer, each thread a contiguous share"
METHOD_ELSEWHERE = "MLX's maximum over the buffer, on its default device"


class MemoryReader:
    """Reads arrays from memory and does hardly anything else with them. `memory_reader` makes one.

    On the CPU, `thread_count()` threads read. Each is bound to a processor of its own if there are as
    many processors as threads. On a GPU, MLX reads.

    Args:
        pool: The threads; `None` leaves the reading to MLX.
        threads: The number of threads.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, threads: int):
        self._pool = pool
        self.threads = threads

    @property
    def method(self) -> str:
        """How it reads, in words."""
        return METHOD_ELSEWHERE if self._pool is None else METHOD_ON_CPU

    def seconds(self, arrays: Sequence[mx.array], repeats: int = 1) -> float:
        """The time to read all arrays once, the least of several measurements."""
        mx.eval(list(arrays))
        return min(self._read(arrays) for _ in range(repeats))

    def _read(self, arrays: Sequence[mx.array]) -> float:
        if self._pool is None:
            return queued_seconds(lambda: [mx.max(array) for array in arrays])
        shares = _shares([_words(array) for array in arrays], self.threads)
        start = time.perf_counter()
        list(self._pool.map(_read_all, shares))
        return time.perf_counter() - start


@contextmanager
def memory_reader() -> Iterator[MemoryReader]:
    """Yields a reader for MLX's default device. Its threads end with the block."""
    threads = thread_count()
    if mx.default_device() != mx.Device(mx.cpu):
        yield MemoryReader(None, threads)
        return
    with ThreadPoolExecutor(threads, initializer=_binder(threads)) as pool:
        yield MemoryReader(pool, threads)


def _words(array: mx.array) -> np.ndarray:
    """The array's own memory, without a copy, as 32-bit words or, if they do not fit, as bytes."""
    data = np.frombuffer(memoryview(cast(Any, array)).cast("B"), np.uint8)
    return data.view(np.uint32) if data.size % 4 == 0 else data


def _shares(buffers: Sequence[np.ndarray], count: int) -> list[list[np.ndarray]]:
    """The buffers, laid end to end, in `count` shares of about equal size."""
    total = sum(buffer.size for buffer in buffers)
    shares: list[list[np.ndarray]] = [[] for _ in range(count)]
    start = 0
    for buffer in buffers:
        for n, share in enumerate(shares):
            first, end = (
                min(max(total * bound // count - start, 0), buffer.size) for bound in (n, n + 1)
            )
            if first < end:
                share.append(buffer[first:end])
        start += buffer.size
    return shares


def _read_all(share: list[np.ndarray]) -> None:
    for part in share:
        np.maximum.reduce(part)


def _binder(threads: int) -> "_Binder | None":
    affinity = getattr(os, "sched_getaffinity", None)
    processors = sorted(affinity(0)) if affinity else []
    return _Binder(processors) if len(processors) == threads else None


class _Binder:
    """Binds each thread that calls it to a processor of its own."""

    def __init__(self, processors: list[int]):
        self._left = processors

    def __call__(self) -> None:
        os.sched_setaffinity(0, {self._left.pop()})

"""Measures how long reading arrays takes, which is the least time for an operation that reads them.

The time of a GPU covers queued work, without the time that Python takes to describe it.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .device import available_memory_bytes
from .threads import thread_count

LEAST_SECONDS = 0.05
"""How long a measurement takes at least. In shorter ones, a GPU does not reach its full clock."""

_MOST_PASSES = 256

Build = Callable[[], Sequence[mx.array]]


def queued_seconds(build: Build) -> float:
    """The seconds of one pass of computations, measured over a queue of many passes.

    One pass comes before and does not count: it compiles kernels and wakes the GPU. All graphs are built
    before the clock starts. Computations of a pass that do not depend on each other may overlap.

    Args:
        build: Returns the arrays of one pass, which are yet to be computed. It is called for each.
    """
    one = _seconds_of_passes(build, 1)
    passes = min(max(ceil(LEAST_SECONDS / one), 1), _MOST_PASSES)
    return _seconds_of_passes(build, passes) / passes


def _seconds_of_passes(build: Build, passes: int) -> float:
    queue = deque(list(build()) for _ in range(passes))
    mx.synchronize()

    def compute() -> None:
        while queue:
            # what is popped is freed as soon as it is computed
            mx.async_eval(queue.popleft())
        mx.synchronize()

    return elapsed(compute)


def elapsed(compute: Callable[[], object]) -> float:
    """The seconds that a function takes."""
    start = perf_counter()
    compute()
    return perf_counter() - start


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
        """How it reads, as text."""
        return METHOD_ELSEWHERE if self._pool is None else METHOD_ON_CPU

    def seconds(self, arrays: Sequence[mx.array], repeats: int = 1) -> float:
        """The time to read all arrays once, the least of several measurements."""
        mx.eval(list(arrays))
        return min(self._read(arrays) for _ in range(repeats))

    def _read(self, arrays: Sequence[mx.array]) -> float:
        if self._pool is None:
            return queued_seconds(lambda: [mx.max(array) for array in arrays])
        pool, shares = self._pool, _shares([_words(array) for array in arrays], self.threads)
        return elapsed(lambda: list(pool.map(_read_all, shares)))


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


BUFFER_BYTES = 512 * 2**20
PASSES = 5


@dataclass(frozen=True)
class Bandwidth:
    """A measured rate of plain reads.

    Attributes:
        bytes_per_second: The rate of the fastest pass.
        method: How it was measured, as text.
    """

    bytes_per_second: float
    method: str


def read_bandwidth(buffer_bytes: int = BUFFER_BYTES) -> Bandwidth:
    """Measures how fast the default device reads a buffer. This takes a few seconds at most.

    The result is the rate of the memory only if the buffer is larger than the caches.

    Args:
        buffer_bytes: The size of the buffer. A quarter of the available memory limits it.
    """
    available = available_memory_bytes()
    size = buffer_bytes if available is None else min(buffer_bytes, available // 4)
    buffer = mx.full((max(size // 4, 1),), 1, mx.uint32)
    with memory_reader() as reader:
        seconds = reader.seconds([buffer], PASSES)
        method = (
            f"{reader.method}; {buffer.nbytes / 2**20:.0f} MiB, threads: {reader.threads}, fastest "
            f"of {PASSES} passes"
        )
    return Bandwidth(buffer.nbytes / seconds, method)

"""The limits of measurements: plain reads of memory and the fastest arithmetic of the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.backend.dispatch import on_cpu
from ..ops.backend.inspection import multiply_rate, read_seconds
from ..platform.gpu_time import queued_seconds
from ..platform.memory_reader import MemoryReader, memory_reader
from ..platform.threads import thread_count
from .benchmark_record import HALF, MULTIPLY

METHOD_OF_KERNELS = "the threads of the compiled kernels, each of which reads a contiguous share"
METHOD_ON_METAL = "a Metal kernel with the grid of a ternary product"

_HALF_DIMS = 2048
_HALF_PRODUCTS = 8


class Limits:
    """Measures the limits of this process. `limits` makes one.

    Args:
        reader: Reads memory where there are no kernels that do.

    Attributes:
        threads: Number of threads that the measurements use, 0 on a GPU.
        arithmetic: The kind of arithmetic that `multiply_rate` measures.
    """

    def __init__(self, reader: MemoryReader):
        self._reader = reader
        self.threads = computing_threads()
        self.arithmetic = MULTIPLY if on_cpu() else HALF
        self._factors: list[mx.array] = []

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """The seconds that it takes to read all arrays once.

        Reading small arrays takes mostly overhead, so that the large ones stand for them.
        """
        size = sum(array.nbytes for array in arrays)
        large = [array for array in arrays if array.nbytes * len(arrays) >= size]
        seconds = read_seconds(large)
        if seconds is None:
            seconds = self._reader.seconds(large)
        return seconds * size / sum(array.nbytes for array in large)

    def read_method(self) -> str:
        """How memory is read, in words."""
        if read_seconds([]) is None:
            return self._reader.method
        return METHOD_OF_KERNELS if on_cpu() else METHOD_ON_METAL

    def multiply_rate(self) -> float | None:
        """The number of multiply-accumulates per second, or `None` where it is unknown."""
        if on_cpu():
            return multiply_rate()
        if not self._factors:
            shape = (_HALF_DIMS, _HALF_DIMS)
            self._factors = [mx.random.normal(shape).astype(mx.float16) for _ in range(2)]
            mx.eval(self._factors)
        a, b = self._factors
        seconds = queued_seconds(lambda: [a @ b for _ in range(_HALF_PRODUCTS)])
        return _HALF_PRODUCTS * _HALF_DIMS**3 / seconds


@contextmanager
def limits() -> Iterator[Limits]:
    """The limits, measured with threads that live as long as the `with` block."""
    with memory_reader() as reader:
        yield Limits(reader)


def computing_threads() -> int:
    """The number of threads that compute, 0 on a GPU."""
    return thread_count() if on_cpu() else 0


def held_arrays(module: nn.Module) -> list[mx.array]:
    """All arrays that a module holds and its kernels may read, even those that are not parameters."""
    return [array for part in module.modules() for value in part.values() for array in _flat(value)]


def _flat(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in _flat(item)]
    return []

"""The limits of measurements: plain reads of memory and the processor's fastest arithmetic."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.backend.inspection import multiply_rate, read_seconds
from ..platform.memory_reader import METHOD_ON_CPU, MemoryReader, memory_reader

METHOD_OF_KERNELS = "the threads of the compiled kernels, each of which reads a contiguous share"


class Limits:
    """Measures the limits of this process. `limits` makes one.

    Args:
        reader: Reads memory where there are no compiled kernels.

    Attributes:
        threads: Number of threads that the measurements use.
    """

    def __init__(self, reader: MemoryReader):
        self._reader = reader
        self.threads = reader.threads

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """The seconds that it takes to read all arrays once."""
        seconds = read_seconds(arrays)
        return self._reader.seconds(arrays) if seconds is None else seconds

    def read_method(self) -> str:
        """How memory is read, in words."""
        by_kernels = self._reader.method == METHOD_ON_CPU and read_seconds([]) is not None
        return METHOD_OF_KERNELS if by_kernels else self._reader.method

    def multiply_rate(self) -> float | None:
        """The number of 8-bit multiply-accumulates per second, or `None` where it is unknown."""
        return multiply_rate() if mx.default_device() == mx.Device(mx.cpu) else None


@contextmanager
def limits() -> Iterator[Limits]:
    """The limits, measured with threads that live as long as the `with` block."""
    with memory_reader() as reader:
        yield Limits(reader)


def held_arrays(module: nn.Module) -> list[mx.array]:
    """All arrays that a module holds and its kernels may read, even those that are not parameters."""
    return [array for part in module.modules() for value in part.values() for array in _flat(value)]


def _flat(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in _flat(item)]
    return []

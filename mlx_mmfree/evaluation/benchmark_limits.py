"""What limits a measurement: a plain read of its memory, or the processor's fastest arithmetic."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.backend.inspection import multiply_rate, read_seconds
from ..platform.memory_reader import METHOD_ON_CPU, MemoryReader, memory_reader

METHOD_OF_KERNELS = "the compiled kernels' own threads, each a contiguous share"


class Limits:
    """Measures the limits of this process. Made by `limits`.

    Args:
        reader: Reads where there are no compiled kernels.
    """

    def __init__(self, reader: MemoryReader):
        self._reader = reader
        self.threads = reader.threads

    def read_seconds(self, arrays: Sequence[mx.array]) -> float:
        """The time to read all of the arrays once."""
        seconds = read_seconds(arrays)
        return self._reader.seconds(arrays) if seconds is None else seconds

    def read_method(self) -> str:
        """How memory is read, in words."""
        by_kernels = self._reader.method == METHOD_ON_CPU and read_seconds([]) is not None
        return METHOD_OF_KERNELS if by_kernels else self._reader.method

    def multiply_rate(self) -> float | None:
        """8-bit multiply-accumulates a second, or `None` where that is not known."""
        return multiply_rate() if mx.default_device() == mx.Device(mx.cpu) else None


@contextmanager
def limits() -> Iterator[Limits]:
    """The limits, measured with threads that end with the `with` block."""
    with memory_reader() as reader:
        yield Limits(reader)


def held_arrays(module: nn.Module) -> list[mx.array]:
    """Every array that a module holds, also where it is no parameter: what its kernels may read."""
    return [array for part in module.modules() for value in part.values() for array in _flat(value)]


def _flat(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in _flat(item)]
    return []

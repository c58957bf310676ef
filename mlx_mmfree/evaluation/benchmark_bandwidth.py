"""The memory bandwidth of a run: the limit for a model that reads all its weights for each token."""

import statistics
from collections.abc import Sequence

import mlx.core as mx

from ..platform.memory_reader import MemoryReader


def measure_bandwidth(reader: MemoryReader, size_bytes: int, repeats: int) -> list[float]:
    """Bytes a second of plain reads of one large buffer.

    Args:
        reader: Reads.
        size_bytes: Size of the buffer; several times the last cache to mean anything.
        repeats: Number of readings.
    """
    buffer = mx.full((size_bytes // 4,), 0x55555555, dtype=mx.uint32)
    return [buffer.nbytes / reader.seconds([buffer]) for _ in range(repeats)]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return float(statistics.median(values))

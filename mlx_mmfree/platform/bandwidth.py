"""How fast the default device reads memory."""

from dataclasses import dataclass

import mlx.core as mx

from .device import available_memory_bytes
from .memory_reader import memory_reader

BUFFER_BYTES = 512 * 2**20
PASSES = 5


@dataclass(frozen=True)
class Bandwidth:
    """A measured rate of plain reads.

    Attributes:
        bytes_per_second: The rate of the fastest pass.
        method: How it was measured, in words.
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

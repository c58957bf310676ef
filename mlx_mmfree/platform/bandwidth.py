"""How fast the default device reads memory."""

from dataclasses import dataclass

import mlx.core as mx

from .device import available_memory_bytes
from .memory_reader import memory_reader

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
    buffer = mx.full((max(size // 4, 1),), 1, mx.uint32)
    with memory_reader() as reader:
        seconds = reader.seconds([buffer], PASSES)
        method = (
            f"{reader.method}; {buffer.nbytes / 2**20:.0f} MiB, threads: {reader.threads}, fastest "
            f"of {PASSES} passes"
        )
    return Bandwidth(buffer.nbytes / seconds, method)

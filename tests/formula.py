"""Weights that follow from their names, so that a frozen result needs no file of them."""

import zlib
from collections.abc import Sequence

import numpy as np


def numbers(shape: Sequence[int], name: str, scale: float = 1.0) -> np.ndarray:
    """Floats within `scale` of 0, by SplitMix64 of their indices and of the name's CRC-32."""
    size = int(np.prod(shape))
    with np.errstate(over="ignore"):
        z = np.arange(size, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) * 1_000_003 + 1)
        z = z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
    return ((z.astype(np.float64) / 2**23 - 1) * scale).astype(np.float32).reshape(shape)

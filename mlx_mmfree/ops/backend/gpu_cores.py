"""How many cores a GPU may have, by its kind of chip."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

MAX_CORES = (40,)
ULTRA_CORES = (80,)
OTHER_CORES = (8, 20)
"""Cores of base chips, and of Pro chips."""

_BY_LETTER = {"s": MAX_CORES, "d": ULTRA_CORES}
"""By the last letter of what MLX calls a chip's architecture."""


@cache
def cores() -> Sequence[int]:
    """The GPU cores that chips of this one's kind have: MLX does not tell how many this one has."""
    architecture = str(mx.device_info().get("architecture", ""))
    return _BY_LETTER.get(architecture[-1:], OTHER_CORES)

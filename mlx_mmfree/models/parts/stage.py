"""Blocks of one width, one after the other, in a model of images."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn


class Stage(nn.Module):
    """Blocks and what stands behind the last.

    Args:
        blocks: The blocks, first to last. Each maps an array to one of the same shape, as `ImageBlock`
            does, or the first to one of fewer places and other dims. A family whose blocks differ writes
            its own in its file.
        norm: What stands between the last block and the next stage or the pooling: a norm, or any
            other module that maps places to places; `None`: nothing.

    Shape:
        `x` and `y`: maps `(B, H, W, D)`, or sequences `(B, N, D)`.
    """

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = list(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def transform(self, x: mx.array) -> mx.array:
        return self.from_last(self.until_last(x))

    def until_last(self, x: mx.array) -> mx.array:
        """What enters the last block."""
        for block in self.blocks[:-1]:
            x = block(x)
        return x

    def from_last(self, x: mx.array) -> mx.array:
        """What the last block and the norm make of `until_last`."""
        for block in self.blocks[-1:]:
            x = block(x)
        y: mx.array = self.norm(x)
        return y


def drop_rates(last: float, depths: Sequence[int]) -> list[list[float]]:
    """The rates of `DropPath` for the blocks of each stage: 0 for the first, growing up to `last`."""
    count = sum(depths)
    rates = iter([last * n / max(1, count - 1) for n in range(count)])
    return [[next(rates) for _ in range(depth)] for depth in depths]

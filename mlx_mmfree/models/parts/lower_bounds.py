"""Lower bounds of forget gates that grow from block to block (Qin et al., arXiv 2311.04823)."""

from typing import ClassVar

import mlx.core as mx

from ...layers.attention.mixer import SelfAttention
from .decoder import Decoder


class BoundedDecoder(Decoder):
    r"""A `Decoder` whose blocks share one table of forget-gate lower bounds.

    The bound of block n is :math:`b_n = \sum_{k=1}^{n} \mathrm{softmax}(\Gamma)_k`, the softmax over
    blocks, so the first block has none. Attention has no gates, but rows in the table.

    Args: as of `Decoder`.
    """

    channel_arrays: ClassVar[tuple[str, ...]] = ("lower_bounds",)

    def add_bounds(self, gates: int) -> "BoundedDecoder":
        """Gives it a fresh table for so many gates of a block, in place, and returns it."""
        self.lower_bounds = mx.zeros((len(self.blocks), gates))
        return self

    def bounds(self) -> mx.array:
        """The bound of each block, float32 `(blocks, E)`."""
        shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=0)
        return mx.cumsum(shares, axis=0) - shares[:1]

    def block_arguments(self) -> list[dict[str, mx.array]]:
        if "lower_bounds" not in self:
            return super().block_arguments()
        bounds = self.bounds()
        return [
            {}
            if n == 0 or isinstance(block.token_mixer, SelfAttention)
            else {"lower_bound": bounds[n]}
            for n, block in enumerate(self.blocks)
        ]

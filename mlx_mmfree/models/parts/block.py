"""One residual block: a token mixer and a channel mixer (MetaFormer, arXiv 2111.11418)."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers import ChannelMixer
from ...layers.arguments import check_sizes
from ...layers.token_mixer import State, TokenMixer


class Block(nn.Module):
    r"""Pre-norm residual block.

    .. math::
        u = x + \mathrm{TokenMixer}(\mathrm{norm}(x)), \quad
        y = u + \mathrm{ChannelMixer}(\mathrm{norm}(u))

    Args:
        dims: Model dims `D`.
        token_mixer: Mixes along the sequence.
        channel_mixer: Mixes within a position.
        norm_eps: Epsilon of both norms.

    Shape:
        `x` and `y`: `(B, L, D)`.
    """

    def __init__(
        self,
        dims: int,
        token_mixer: TokenMixer,
        channel_mixer: ChannelMixer,
        *,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        check_sizes("Block", dims=dims)
        self.token_norm = nn.RMSNorm(dims, eps=norm_eps)
        self.token_mixer = token_mixer
        self.channel_norm = nn.RMSNorm(dims, eps=norm_eps)
        self.channel_mixer = channel_mixer

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        return self.token_mixer.init_state(batch_size, dtype)

    def __call__(
        self, x: mx.array, state: State = None, valid: mx.array | None = None, **context: Any
    ) -> tuple[mx.array, State]:
        """`context` goes to the token mixer, as a lower bound or a second sequence does."""
        # items, since attributes of a module are slow to find
        x, state = self["token_mixer"].residual(x, self["token_norm"], state, valid, **context)
        y: mx.array = self["channel_mixer"].residual(x, self["channel_norm"])
        return y, state

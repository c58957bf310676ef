"""The interface that every channel mixer follows."""

import mlx.core as mx
import mlx.nn as nn


class ChannelMixer(nn.Module):
    """A module that mixes within each position: maps `(..., D)` to `(..., D)`."""

    def __call__(self, x: mx.array) -> mx.array:
        raise NotImplementedError

    def residual(self, x: mx.array, norm: nn.Module | None) -> mx.array:
        """`x + mixer(norm(x))`, or `x + mixer(x)` without a norm.

        A mixer overrides it to compute norm and sum together with its projections.
        """
        return x + self(x if norm is None else norm(x))

"""The interface that every channel mixer follows."""

import mlx.core as mx
import mlx.nn as nn

from .partition import Group, Partition


class ChannelMixer(nn.Module):
    """A module that mixes within each position; a subclass computes it in `__call__`.

    Attributes:
        partition: How it is divided between processes; `None`: it cannot be.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> class Doubling(ChannelMixer):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> Doubling().residual(mx.ones((1, 2)), norm=None).tolist()
        [[3.0, 3.0]]
    """

    partition: Partition | None = None

    def __call__(self, x: mx.array) -> mx.array:
        raise NotImplementedError

    def take_part(self, group: Group) -> None:
        """As that of a `TokenMixer`."""

    def residual(self, x: mx.array, norm: nn.Module | None) -> mx.array:
        """`x + mixer(norm(x))`, or `x + mixer(x)` without a norm.

        A mixer overrides it to compute norm and sum together with its projections.
        """
        return x + self(x if norm is None else norm(x))

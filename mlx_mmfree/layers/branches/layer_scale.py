"""A learned factor for each channel of a residual branch (CaiT, Touvron et al., arXiv 2103.17239)."""

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_sizes


class LayerScale(nn.Module):
    r"""Multiplies each channel by a number of its own, :math:`y_c = \gamma_c\,x_c`.

    Args:
        dims: Channels `D`.
        initial: All numbers at first; small, so that a deep model begins near the identity.

    Shape:
        `x` and `y`: `(..., D)`; `weight`: `(D,)`.

    Example:
        >>> LayerScale(2, 0.5)(mx.ones((1, 2)))
        array([[0.5, 0.5]], dtype=float32)
    """

    def __init__(self, dims: int, initial: float = 1e-5):
        super().__init__()
        check_sizes("LayerScale", dims=dims)
        self.weight = mx.full((dims,), initial)

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight.astype(x.dtype)

"""Norm over a whole map, which PoolFormer has (Yu et al., arXiv 2111.11418)."""

import mlx.core as mx
import mlx.nn as nn

from ...ops import long_sum
from ..arguments import check_sizes


class MapNorm(nn.Module):
    r"""Every map gets the mean 0 and the variance 1 over all its numbers, then a scale and a shift.

    .. math::
        y_{p,c} = \frac{x_{p,c} - \mu}{\sqrt{\sigma^2 + \epsilon}}\,\gamma_c + \beta_c

    It is the group norm (Wu and He, arXiv 1803.08494) with one group. Unlike MLX's own, it adds its long
    sums block by block.

    Args:
        dims: Channels `D`.
        eps: :math:`\epsilon`.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Example:
        >>> MapNorm(8)(mx.zeros((2, 5, 4, 8))).shape
        (2, 5, 4, 8)
    """

    def __init__(self, dims: int, *, eps: float = 1e-5):
        super().__init__()
        check_sizes("MapNorm", dims=dims)
        self._eps = eps
        self.weight = mx.ones((dims,))
        self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        numbers = x.reshape(x.shape[0], -1).astype(mx.float32)
        mean = _mean(numbers)
        centred = numbers - mean
        scale = mx.rsqrt(_mean(centred.square()) + self._eps)[..., None, None]
        y = centred.reshape(x.shape) * (scale * self.weight.astype(mx.float32))
        return (y + self.bias.astype(mx.float32)).astype(x.dtype)


def _mean(rows: mx.array) -> mx.array:
    """That of each row, `(B, 1)`."""
    return long_sum(rows, axis=-1)[:, None] / rows.shape[1]

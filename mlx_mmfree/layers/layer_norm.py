"""The norm by mean and variance, by the operation of this library."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import layer_norm


class LayerNorm(nn.LayerNorm):
    """MLX's norm; on a CPU, the operations that MLX makes it of take several times as long.

    Args:
        dims: Dims `D`.
        eps: Is added to the variance.
        affine: Whether there is a scale and a bias.
        bias: Whether there is a bias beside the scale.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> LayerNorm(8)(mx.zeros((2, 8))).shape
        (2, 8)
    """

    def __call__(self, x: mx.array) -> mx.array:
        return layer_norm(x, self.get("weight"), self.get("bias"), eps=self.eps)

"""A norm of MLX, by the operation of this library where it is the same."""

import mlx.core as mx
import mlx.nn as nn

from ..ops import rms_norm


def apply_norm(norm: nn.Module, x: mx.array) -> mx.array:
    """Applies a norm, an RMSNorm by `ops.rms_norm` and any other as it is.

    On a CPU, the operations that MLX makes an RMSNorm of take four times as long.

    Args:
        norm: Any norm.
        x: `(..., D)`.

    Returns:
        `(..., D)`.

    Example:
        >>> [round(n, 4) for n in apply_norm(nn.RMSNorm(2), mx.array([3.0, 4.0])).tolist()]
        [0.8485, 1.1314]
    """
    if type(norm) is nn.RMSNorm and norm["weight"].dtype == x.dtype:
        return rms_norm(x, norm["weight"], eps=norm.eps)
    y: mx.array = norm(x)
    return y

"""An activation of each number."""

from typing import get_args

import mlx.core as mx

from ..activations import Activation
from ..backend.dispatch import dispatch


def activate(x: mx.array, activation: Activation) -> mx.array:
    r"""Computes an activation of each number, :math:`y = a(x)`.

    Sources: GELU (Hendrycks and Gimpel, arXiv 1606.08415), the exact one; SiLU, the same paper; the
    square of ReLU (So et al., arXiv 2109.08668).

    Args:
        x: Floats of any shape and dtype.
        activation: The name of `a`: `"silu"`, `"relu2"` (the square of ReLU), `"gelu"` or `"relu"`.

    Returns:
        The shape of `x`, in its dtype, or in float32 for `"relu2"`.

    Raises:
        ValueError: The activation is unknown.

    Example:
        >>> activate(mx.array([-1.0, 0.0, 2.0]), "relu2").tolist()
        [0.0, 0.0, 4.0]
    """
    if activation not in get_args(Activation):
        raise ValueError(
            f"[activate] 'activation' must be one of {', '.join(get_args(Activation))} but got "
            f"{activation!r:.40}."
        )
    if x.size == 0:
        return mx.zeros(x.shape, mx.float32 if activation == "relu2" else x.dtype)
    y: mx.array = dispatch(__name__, x, activation)
    return y

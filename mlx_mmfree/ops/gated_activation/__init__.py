"""The activation of a gate times what it gates."""

from typing import get_args

import mlx.core as mx

from ..activations import Activation
from ..backend.dispatch import dispatch


def gated_activation(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    r"""Multiplies values by an activation of their gate.

    .. math::
        y = a(g) \odot u

    Source: gated linear units (Shazeer, arXiv 2002.05202).

    Args:
        gate: `(..., D)`, any float dtype.
        up: `(..., D)` of the same dtype.
        activation: The name of `a`: `"silu"`, `"relu2"` (the square of ReLU), `"gelu"` or `"relu"`.

    Returns:
        `(..., D)` in the dtype of `gate`, or in float32 for `"relu2"`.

    Raises:
        ValueError: The shapes or dtypes do not agree, or the activation is unknown.

    Example:
        >>> gated_activation(mx.array([2.0, -1.0]), mx.array([3.0, 5.0]), "relu2").tolist()
        [12.0, 0.0]
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "[gated_activation] 'gate' and 'up' must have the same shape and dtype but got "
            f"{gate.shape} of {gate.dtype} and {up.shape} of {up.dtype}."
        )
    if activation not in get_args(Activation):
        raise ValueError(
            f"[gated_activation] 'activation' must be one of {', '.join(get_args(Activation))} but "
            f"got {activation!r:.40}."
        )
    if gate.size == 0:
        return mx.zeros(gate.shape, mx.float32 if activation == "relu2" else gate.dtype)
    y: mx.array = dispatch(__name__, gate, up, activation)
    return y


def gated(x: mx.array, activation: Activation) -> mx.array:
    r"""`gated_activation` of the halves of the last axis, the gate first.

    .. math::
        y = a(x_{..D}) \odot x_{D..}

    Source: gated linear units (Shazeer, arXiv 2002.05202).

    Args:
        x: `(..., 2D)`, any float dtype.
        activation: The name of the activation.

    Returns:
        `(..., D)` in the dtype of `x`, or in float32 for `"relu2"`.

    Raises:
        ValueError: The last axis is odd, or the activation is unknown.

    Example:
        >>> gated(mx.array([2.0, -1.0, 3.0, 5.0]), "relu").tolist()
        [6.0, 0.0]
    """
    if x.shape[-1] % 2:
        raise ValueError(f"[gated] 'x' must have an even last axis but got {x.shape}.")
    if x.size == 0:
        gate, up = mx.split(x, 2, axis=-1)
        return gated_activation(gate, up, activation)
    y: mx.array = dispatch(__name__, x, None, activation)
    return y

"""The activations of gated units, by name."""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

Activation = Literal["silu", "relu2", "gelu", "relu"]


def squared_relu(x: mx.array) -> mx.array:
    """The square of `max(x, 0)`, in float32 because squares of float16 overflow."""
    return nn.relu(x.astype(mx.float32)).square()


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": nn.silu,
    "relu2": squared_relu,
    "gelu": nn.gelu,
    "relu": nn.relu,
}
r"""What each name of an activation stands for, a function from an array to one of its shape.

.. math::
    \mathrm{silu}(x) = x\,\sigma(x), \quad \mathrm{relu2}(x) = \max(x, 0)^2, \quad
    \mathrm{gelu}(x) = x\,\Phi(x), \quad \mathrm{relu}(x) = \max(x, 0)

Example:
    >>> ACTIVATIONS["relu2"](mx.array([-1.0, 2.0])).tolist()
    [0.0, 4.0]
"""

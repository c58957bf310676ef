"""Activations, which MLX fuses on a GPU alone.

Those of `mlx.nn` are fused on a CPU too: MLX compiles each there and loads the result from a folder of
the temporary directory whose name anybody can take first.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Literal

import mlx.core as mx

from .backend.dispatch import on_cpu

Activation = Literal["silu", "relu2", "gelu", "relu"]


def _fused_on_gpu(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    fused = mx.compile(function, shapeless=True)

    @wraps(function)
    def call(x: mx.array) -> mx.array:
        y: mx.array = function(x) if on_cpu() else fused(x)
        return y

    return call


def relu(x: mx.array) -> mx.array:
    """`max(x, 0)`."""
    return mx.maximum(x, 0)


def squared_relu(x: mx.array) -> mx.array:
    """The square of `max(x, 0)`, in float32 because squares of float16 overflow."""
    return relu(x.astype(mx.float32)).square()


@_fused_on_gpu
def silu(x: mx.array) -> mx.array:
    """`x sigmoid(x)`."""
    return x * mx.sigmoid(x)


@_fused_on_gpu
def log_sigmoid(x: mx.array) -> mx.array:
    """The logarithm of the sigmoid, which is finite wherever `x` is."""
    return -mx.logaddexp(-x, 0)


@_fused_on_gpu
def gelu(x: mx.array) -> mx.array:
    """`x Phi(x)`, where `Phi` is the distribution function of the normal distribution."""
    return x * (1 + mx.erf(x / math.sqrt(2))) / 2


@_fused_on_gpu
def gelu_tanh(x: mx.array) -> mx.array:
    """The approximation of GELU by a hyperbolic tangent."""
    # beyond 20 the tangent is 1, while cubes of float16 overflow
    z = mx.clip(x, -20, 20)
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


@_fused_on_gpu
def elu_plus_one(x: mx.array) -> mx.array:
    """`x + 1` where `x` is positive, elsewhere `exp(x)`, which does not cancel as `elu(x) + 1` does."""
    is_positive = x > 0
    # the gradient of the branch that is not taken must not overflow either
    return mx.where(is_positive, x + 1, mx.exp(mx.where(is_positive, 0, x)))


@_fused_on_gpu
def hardswish(x: mx.array) -> mx.array:
    """`x min(max(x + 3, 0), 6) / 6`."""
    return x * mx.minimum(mx.maximum(x + 3, 0), 6) / 6


ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    "silu": silu,
    "relu2": squared_relu,
    "gelu": gelu,
    "relu": relu,
}
r"""What each name of an activation stands for, a function from an array to one of its shape.

.. math::
    \mathrm{silu}(x) = x\,\sigma(x), \quad \mathrm{relu2}(x) = \max(x, 0)^2, \quad
    \mathrm{gelu}(x) = x\,\Phi(x), \quad \mathrm{relu}(x) = \max(x, 0)

Example:
    >>> ACTIVATIONS["relu2"](mx.array([-1.0, 2.0])).tolist()
    [0.0, 4.0]
"""

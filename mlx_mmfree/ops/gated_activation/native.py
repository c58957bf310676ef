"""`gated_activation` on the CPU in C++, in one pass. Its gradient is a kernel too.

MLX computes exponentials on a CPU one by one, and keeps an array for each operation.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..activations import Activation
from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import reference


def unsupported(gate: mx.array, up: mx.array, activation: Activation) -> str | None:
    return None if gate.dtype in FLOATS else f"an argument is {gate.dtype}"


def run(gate: mx.array, up: mx.array, activation: Activation) -> mx.array:
    y: mx.array = _kernel()(gate, up, activation)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    gate, up, cotangent = arrays
    gradients: list[mx.array] = mx.vjp(
        lambda gate, up: reference.run(gate, up, options[0]), [gate, up], [cotangent]
    )[1]
    return gradients


_kernel = native_kernel("gated_activation", _gradient)

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


def unsupported(gate: mx.array, up: mx.array | None, activation: Activation) -> str | None:
    return None if gate.dtype in FLOATS else f"an argument is {gate.dtype}"


def run(gate: mx.array, up: mx.array | None, activation: Activation) -> mx.array:
    y: mx.array = _kernel()(gate, up, activation)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    gate, up, cotangent = arrays
    given = [gate] if up is None else [gate, up]
    gradients: list[mx.array] = mx.vjp(
        lambda gate, up=None: reference.run(gate, up, options[0]), given, [cotangent]
    )[1]
    return gradients


_kernel = native_kernel("gated_activation", _gradient)

"""`activate` on the CPU in C++, in one pass. Its gradient is a kernel too.

MLX computes exponentials and the error function on a CPU one by one.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..activations import Activation
from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import reference


def unsupported(x: mx.array, activation: Activation) -> str | None:
    return None if x.dtype in FLOATS else f"an argument is {x.dtype}"


def run(x: mx.array, activation: Activation) -> mx.array:
    y: mx.array = _kernel()(x, activation)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, cotangent = arrays
    gradients: list[mx.array] = mx.vjp(lambda x: reference.run(x, options[0]), [x], [cotangent])[1]
    return gradients


_kernel = native_kernel("activate", _gradient)

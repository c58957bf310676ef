"""`layer_norm` on the CPU in C++, in one pass. Its gradient is a kernel too."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import reference


def unsupported(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, *, eps: float
) -> str | None:
    for array in (x, weight, bias):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    return None


def run(x: mx.array, weight: mx.array | None, bias: mx.array | None, *, eps: float) -> mx.array:
    y: mx.array = _kernel()(x, weight, bias, eps)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, weight, cotangent = arrays
    dims = x.shape[-1:]
    # without a weight, the second result is that of ones
    scale = mx.ones(dims) if weight is None else weight.astype(mx.float32)
    gradients: list[mx.array] = mx.vjp(
        lambda x, weight, bias: reference.run(x, weight, bias, eps=options[0]),
        [x, scale, mx.zeros(dims)],
        [cotangent],
    )[1]
    return gradients


_kernel = native_kernel("layer_norm", _gradient)

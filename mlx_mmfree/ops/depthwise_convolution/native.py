"""`depthwise_convolution` on the CPU in C++, many channels at once. Its gradient is a kernel too."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import reference


def unsupported(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> str | None:
    for array in (x, weight, bias):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    return None


def run(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> mx.array:
    y: mx.array = _kernel()(x, weight, bias, stride)
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    x, weight, cotangent = arrays
    stride, wants_x, wants_weight = options
    given = [x, weight.astype(mx.float32), mx.zeros(x.shape[-1:])]
    gradients: list[mx.array] = mx.vjp(
        lambda x, weight, bias: reference.run(x, weight, bias, stride), given, [cotangent]
    )[1]
    return (gradients[:1] if wants_x else []) + (gradients[1:] if wants_weight else [])


_kernel = native_kernel("depthwise_convolution", _gradient)

"""`dense_matmul` on the CPU in C++. Weights are read as they are, in one stream for each thread."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from . import AffineForm, chunked


def run(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> mx.array:
    scales, biases, _, bits = quantization or (None, None, 0, 0)
    y: mx.array = _kernel()(x.astype(mx.float32), weight, scales, biases, bits)
    return y


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, weight, scales, biases = arrays
    if scales is None:
        return [chunked.run(x, weight, None)]
    group_size = x.shape[-1] // scales.shape[1]
    return [chunked.run(x, weight, AffineForm(scales, biases, group_size, options[0]))]


_kernel = native_kernel("dense_matmul", _definition)

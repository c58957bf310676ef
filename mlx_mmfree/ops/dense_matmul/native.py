"""`dense_matmul` on the CPU in C++: weights are read as they are, as one stream for each thread."""

import mlx.core as mx

from ...native import kernels
from ..backend.gradient import with_reference_gradient
from . import AffineForm, chunked


def run(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> mx.array:
    module = kernels()
    y: mx.array
    if quantization is None:
        y = with_reference_gradient(
            lambda x, weight: module.dense_matmul(x.astype(mx.float32), weight),
            lambda x, weight: chunked.run(x, weight, None),
        )(x, weight)
        return y
    scales, biases, _, bits = quantization
    # codes have no gradient, and MLX knows none of scales: all of them are constants here
    y = with_reference_gradient(
        lambda x: module.quantized_matmul(x.astype(mx.float32), weight, scales, biases, bits),
        lambda x: chunked.run(x, weight, quantization),
    )(x)
    return y

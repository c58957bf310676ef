"""Definition of `dense_matmul`: one float32 product."""

import mlx.core as mx

from . import AffineForm


def run(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> mx.array:
    if quantization is not None:
        scales, biases, group_size, bits = quantization
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
    return x.astype(mx.float32) @ weight.astype(mx.float32).T

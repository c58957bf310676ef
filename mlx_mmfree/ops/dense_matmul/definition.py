"""The definition of a product with a dense matrix, and what MLX's own products make of it."""

from typing import NamedTuple

import mlx.core as mx

BITS = (1, 2, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
BLOCK_SIZE = 32
"""Neighbouring activations that share a scale where they are rounded."""


class AffineFormat(NamedTuple):
    """MLX's affine format, in which a weight is `scale * code + bias` with one scale and bias for a
    group.

    Attributes:
        scales: `(N, D / group_size)`, float32, float16 or bfloat16.
        biases: Of the shape and dtype of `scales`.
        group_size: 32, 64 or 128.
        bits: The bits of a code: 1, 2, 4, 6 or 8.

    Example:
        >>> codes, scales, biases = mx.quantize(mx.ones((6, 64)), group_size=32, bits=4)
        >>> variant = AffineFormat(scales, biases, group_size=32, bits=4)
        >>> dense_matmul(mx.ones((1, 64)), codes, variant).shape
        (1, 6)
    """

    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


def round_activations(x: mx.array) -> mx.array:
    """Each 32 neighbours as multiples of their largest magnitude / 127, with the gradient of `x`."""
    x = x.astype(mx.float32)
    blocks = mx.unflatten(mx.stop_gradient(x), -1, (-1, BLOCK_SIZE))
    largest = mx.abs(blocks).max(axis=-1, keepdims=True)
    # smaller blocks count as zeros, since their scale would be no normal number
    inverse = mx.where(largest < 1e-30, 0.0, 127.0 / largest)
    rounded = mx.flatten(mx.round(blocks * inverse) * (largest / 127.0), -2)
    return x + mx.stop_gradient(rounded - x)


def reference(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """The definition: one float32 product."""
    x = round_activations(x) if rounds else x
    if quantization is not None:
        scales, biases, group_size, bits = quantization
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
    return (x.astype(mx.float32) @ weight.astype(mx.float32).T).astype(dtype)


BLOCK_WEIGHTS = 2**24
FEW_ROWS = 2
"""The most rows for which MLX multiplies codes in less time than it takes to write them out."""


def chunked(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """MLX's own product for few rows and codes; otherwise the definition for some outputs at a time."""
    x = round_activations(x) if rounds else x
    if quantization is None or x.size > FEW_ROWS * x.shape[-1]:
        return in_blocks(x, weight, quantization).astype(dtype)
    scales, biases = (part.astype(mx.float32) for part in quantization[:2])
    variant = quantization._replace(scales=scales, biases=biases)
    return of_mlx(x.astype(mx.float32), weight, variant, dtype=dtype)


def in_blocks(x: mx.array, weight: mx.array, quantization: AffineFormat | None) -> mx.array:
    """The definition for some outputs at a time, so that few weights are in memory as float32."""
    if quantization is None and weight.dtype == mx.float32:
        return reference(x, weight, None)
    rows = max(BLOCK_WEIGHTS // max(x.shape[-1], 1), 1)
    parts = []
    for start in range(0, max(weight.shape[0], 1), rows):
        block = slice(start, start + rows)
        part = quantization and quantization._replace(
            scales=quantization.scales[block], biases=quantization.biases[block]
        )
        parts.append(reference(x, weight[block], part))
    return mx.concatenate(parts, axis=-1)


def of_mlx(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """MLX's own kernels, in the dtype of the arguments."""
    x = round_activations(x).astype(x.dtype) if rounds else x
    if quantization is None:
        return (x @ weight.T).astype(dtype)
    scales, biases, group_size, bits = quantization
    y = mx.quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=bits)
    return y.astype(dtype)

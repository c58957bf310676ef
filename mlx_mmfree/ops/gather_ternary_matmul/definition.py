"""Definition of `gather_ternary_matmul`, and the product in MLX's own kernel.

To it, packed words are affine 2-bit matrices with scale 1 and bias -1.
"""

from collections.abc import Sequence

import mlx.core as mx

from ..backend.gradient import with_reference_gradient
from ..ternary import CODES_PER_WORD, unpack_ternary
from ..ternary_matmul.definition import GROUP_SIZES, ones

BLOCK_WEIGHTS = 2**22


def reference(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """The definition: unpack the matrix of each row, then one float32 product. Some rows at a time."""
    dims, (_, outputs, words) = x.shape[-1], weight.shape
    rows, named = x.reshape(-1, dims).astype(mx.float32), indices.reshape(-1)
    step = max(BLOCK_WEIGHTS // (outputs * dims), 1)
    parts = []
    for start in range(0, len(rows), step):
        chosen = weight[named[start : start + step]]
        trits = unpack_ternary(chosen.reshape(-1, words), dims).reshape(len(chosen), outputs, dims)
        parts.append((trits @ rows[start : start + step, :, None])[..., 0])
    return mx.concatenate(parts).reshape(*x.shape[:-1], outputs)


def gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    """The gradient of `x`."""
    x, weight, indices = inputs
    return _product(cotangents[0], weight, indices, False)[..., : x.shape[-1]], None, None


def mlx_product(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """MLX's product, which reads the matrices that are named."""
    width = weight.shape[2] * CODES_PER_WORD
    padding = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    return _product(mx.pad(x.astype(mx.float32), padding), weight, indices, True)


def _product(x: mx.array, weight: mx.array, indices: mx.array, transpose: bool) -> mx.array:
    experts, outputs, words = weight.shape
    group_size = next(size for size in GROUP_SIZES if words * CODES_PER_WORD % size == 0)
    scales, biases = (
        array.reshape(experts, outputs, -1)
        for array in ones(experts * outputs, words * CODES_PER_WORD // group_size, mx.float32)
    )
    y = mx.gather_qmm(
        x.astype(mx.float32)[..., None, :],
        weight,
        scales,
        biases,
        rhs_indices=indices,
        transpose=transpose,
        group_size=group_size,
        bits=2,
    )
    return y[..., 0, :]


chunked = with_reference_gradient(mlx_product, reference, gradients)
"""MLX's own product, where the library's kernels cannot run."""

"""Definition of `ternary_matmul`, and the product in MLX's own kernels.

To these, packed words are an affine 2-bit matrix with scale 1 and bias -1.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from ..backend.dispatch import on_cpu
from ..backend.gradient import with_reference_gradient
from ..ternary import CODES_PER_WORD, unpack_ternary
from ..unpacked import FEW_ROWS, unpacked_matrices

GROUP_SIZES = (128, 64, 32)
FEW_ROWS_IN_CODES = 2
BLOCK_WEIGHTS = 2**22


MOST_CODES = 2**24 // 256
"""The most 8-bit codes of which all sums are exact. MLX adds up codes times 0, 1 or 2."""


def reference(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    """The definition: unpack, then one float32 product."""
    return x.astype(mx.float32) @ unpack_ternary(weight, x.shape[-1]).T


def is_exact(dtype: mx.Dtype, dims: int, codes: bool) -> bool:
    """Returns whether sums of codes are exact on every GPU, and products of floats as exact as in
    float32.

    On GPUs with matrix units MLX multiplies float32 as TF32, whose 11 bits hold codes and halves.
    """
    return dims <= MOST_CODES if codes else dtype in (mx.float16, mx.bfloat16)


def mlx_product(x: mx.array, weight: mx.array) -> mx.array:
    """MLX's product: float32 sums of `x`, float32 of shape `(..., D)`, and packed trits."""
    width = weight.shape[1] * CODES_PER_WORD
    if width != x.shape[-1]:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    group_size = next(size for size in GROUP_SIZES if width % size == 0)
    scales, biases = ones(weight.shape[0], width // group_size, mx.float32)
    return mx.quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=2)


def unpacked_trits(weight: mx.array, dims: int, dtype: mx.Dtype) -> mx.array:
    """The trits of packed words, `(N, dims)`, by one kernel of MLX."""
    scales, biases = ones(weight.shape[0], weight.shape[1] // 2, dtype)
    trits = mx.dequantize(weight, scales, biases, group_size=GROUP_SIZES[-1], bits=2)
    return trits[:, :dims]


def gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    """The gradient of `x` in a product with packed trits: one dense product in the dtype of `x`."""
    x, weight = inputs
    return cotangents[0].astype(x.dtype) @ unpacked_trits(weight, x.shape[-1], x.dtype), None


@lru_cache(maxsize=16)
def ones(outputs: int, groups: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Scales and biases of as many groups, made once for all matrices of a shape."""
    ones = mx.ones((outputs, groups), dtype)
    pair = ones, -ones
    # a lazy array belongs to the thread that made it
    mx.eval(pair)
    return pair


def chunked(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    """MLX's own products, where the library's kernels cannot run.

    On a GPU, MLX multiplies by packed words as they are. On a CPU it is slow with them, so they are
    unpacked. This is done once if there is memory to keep the floats. Otherwise it is done for some
    outputs at a time, from 3 rows on. Activations are float32, so that sums of codes stay exact.
    """
    if not on_cpu():
        y: mx.array = _on_gpu(x, weight)
        return y
    x = x.astype(mx.float32)
    dims = x.shape[-1]
    floats = unpacked_matrices().find((weight,), dims)
    if floats is not None:
        if x.size > FEW_ROWS * dims:
            return x @ floats.whole.T
        y = x.reshape(1, -1, dims) @ floats.blocks
        return y.swapaxes(0, 1).reshape(*x.shape[:-1], -1)
    if x.size <= FEW_ROWS_IN_CODES * dims:
        return mlx_product(x, weight)
    rows = max(BLOCK_WEIGHTS // dims, 1)
    parts = [
        x @ unpack_ternary(weight[start : start + rows], dims).T
        for start in range(0, weight.shape[0], rows)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


_on_gpu = with_reference_gradient(
    lambda x, weight: mlx_product(x.astype(mx.float32), weight),
    lambda x, weight: reference(x, weight, codes=False),
    gradients,
)

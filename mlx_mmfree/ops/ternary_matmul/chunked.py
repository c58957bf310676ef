"""`ternary_matmul` in MLX's own products, where the library's kernels cannot run.

On a GPU, packed words are an affine 2-bit matrix with scale 1 and bias -1. On a CPU, MLX is slow with
such matrices, so they are unpacked. This is done once if there is memory to keep the floats. Otherwise
it is done for some outputs at a time, from 3 rows on. Activations are float32, so that sums of codes
stay exact.
"""

import mlx.core as mx

from ..backend.dispatch import on_cpu
from ..ternary import CODES_PER_WORD, unpack_ternary
from ..unpacked import FEW_ROWS, unpacked_matrices

GROUP_SIZES = (128, 64, 32)
FEW_ROWS_IN_CODES = 2
BLOCK_WEIGHTS = 2**22


def run(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    x = x.astype(mx.float32)
    if not on_cpu():
        return _quantized(x, weight)
    dims = x.shape[-1]
    floats = unpacked_matrices().find((weight,), dims)
    if floats is not None:
        if x.size > FEW_ROWS * dims:
            return x @ floats.whole.T
        y = x.reshape(1, -1, dims) @ floats.blocks
        return y.swapaxes(0, 1).reshape(*x.shape[:-1], -1)
    if x.size <= FEW_ROWS_IN_CODES * dims:
        return _quantized(x, weight)
    rows = max(BLOCK_WEIGHTS // dims, 1)
    parts = [
        x @ unpack_ternary(weight[start : start + rows], dims).T
        for start in range(0, weight.shape[0], rows)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _quantized(x: mx.array, weight: mx.array) -> mx.array:
    outputs, words = weight.shape
    width = words * CODES_PER_WORD
    group_size = next(size for size in GROUP_SIZES if width % size == 0)
    if width != x.shape[-1]:
        x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    ones = mx.ones((outputs, width // group_size))
    return mx.quantized_matmul(x, weight, ones, -ones, group_size=group_size, bits=2)

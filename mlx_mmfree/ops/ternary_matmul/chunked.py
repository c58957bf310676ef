"""`ternary_matmul` in MLX's own products, where the library's kernels cannot run.

On a GPU, MLX multiplies by packed words as they are. On a CPU it is slow with them, so they are
unpacked. This is done once if there is memory to keep the floats. Otherwise it is done for some outputs
at a time, from 3 rows on. Activations are float32, so that sums of codes stay exact.
"""

import mlx.core as mx

from ..backend.dispatch import on_cpu
from ..backend.gradient import with_reference_gradient
from ..ternary import unpack_ternary
from ..unpacked import FEW_ROWS, unpacked_matrices
from . import quantized, reference

FEW_ROWS_IN_CODES = 2
BLOCK_WEIGHTS = 2**22


def run(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
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
        return quantized.product(x, weight)
    rows = max(BLOCK_WEIGHTS // dims, 1)
    parts = [
        x @ unpack_ternary(weight[start : start + rows], dims).T
        for start in range(0, weight.shape[0], rows)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


_on_gpu = with_reference_gradient(
    lambda x, weight: quantized.product(x.astype(mx.float32), weight),
    lambda x, weight: reference.run(x, weight, codes=False),
    quantized.gradients,
)

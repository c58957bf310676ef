"""`ternary_matmul` by MLX's own 2-bit product, for GPUs on which the library's kernels cannot run.

Packed words are an affine 2-bit matrix with scale 1 and bias -1. Activations are float32, so that
sums of codes stay exact.
"""

import mlx.core as mx

from ..ternary import CODES_PER_WORD

GROUP_SIZES = (128, 64, 32)


def unsupported(x: mx.array, weight: mx.array, *, codes: bool) -> str | None:
    if mx.default_device() == mx.Device(mx.cpu):
        return "on a CPU mx.quantized_matmul is slower than the definition from 3 rows on"
    return None


def run(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    outputs, words = weight.shape
    width = words * CODES_PER_WORD
    group_size = next(size for size in GROUP_SIZES if width % size == 0)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    ones = mx.ones((outputs, width // group_size))
    return mx.quantized_matmul(
        mx.pad(x.astype(mx.float32), padding), weight, ones, -ones, group_size=group_size, bits=2
    )

"""`ternary_matmul` on the CPU in C++. Packed words are read as they are, once for many rows."""

import mlx.core as mx

from ...native import kernels
from ..five_trits import refuse_fives


def unsupported(x: mx.array, weight: mx.array, *, codes: bool) -> str | None:
    return refuse_fives(weight)


def run(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    sums: mx.array = kernels().ternary_matmul(x.astype(mx.float32), weight, codes)
    return sums

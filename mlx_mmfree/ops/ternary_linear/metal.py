"""`ternary_linear` by the operations that it is made of, which multiply bfloat16 as it is.

bfloat16 holds codes and trits exactly, and a GPU sums in float32.
"""

import mlx.core as mx

from . import Quantization
from .reference import multiplied


def run(
    x: mx.array,
    weight: mx.array,
    norm: mx.array | None,
    *,
    eps: float | None,
    quantization: Quantization,
) -> mx.array:
    dtype = mx.bfloat16 if x.dtype == mx.bfloat16 else mx.float32
    return multiplied(x, weight, norm, eps, quantization, dtype)

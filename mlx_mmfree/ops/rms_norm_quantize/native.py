"""`rms_norm_quantize` on the CPU in C++: a row is read and written once."""

import mlx.core as mx

from ...native import kernels
from ..float_dtypes import FLOATS


def run(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    x = x if x.dtype in FLOATS else x.astype(mx.float32)
    weight = None if weight is None else weight.astype(mx.float32)
    codes, scale = kernels().rms_norm_quantize(x, weight, eps, rounding == "half_away")
    return codes, scale

"""`rms_norm_quantize` on the CPU in C++. A row is read and written once. So is it in the gradient."""

import mlx.core as mx

from ... import native
from ..float_dtypes import FLOATS
from ..rms_norm import native as norm


def run(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    # the gradient is that of the norm, which knows its definition once it is loaded
    norm.kernel()
    x = x if x.dtype in FLOATS else x.astype(mx.float32)
    weight = None if weight is None else weight.astype(mx.float32)
    codes, scale = native.kernels().rms_norm_quantize(x, weight, eps, rounding == "half_away")
    return codes, scale

"""`rms_norm_quantize` on the CPU in C++. A row is read and written once."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from ..rms_norm import rms_norm


def run(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    x = x if x.dtype in FLOATS else x.astype(mx.float32)
    weight = None if weight is None else weight.astype(mx.float32)
    codes, scale = _kernel()(x, weight, eps, rounding == "half_away")
    return codes, scale


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, weight = arrays
    # the codes have the gradient of what is rounded, and the scale has none
    scale = mx.stop_gradient(results[1])
    y = x.astype(mx.float32)
    return [(y if options[0] is None else rms_norm(y, weight, eps=options[0])) * scale, scale]


_kernel = native_kernel("rms_norm_quantize", _definition)

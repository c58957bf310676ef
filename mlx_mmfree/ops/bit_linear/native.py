"""`bit_linear` on the CPU in C++, in one pass over the weights."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from ..rms_norm_quantize import Rounding
from . import Options, Projection, reference

CHECKS_ARGUMENTS = True


def unsupported(x: mx.array, projections: tuple[Projection, ...], options: Options) -> str | None:
    return None if x.dtype in FLOATS else f"'x' is {x.dtype}"


def run(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    eps, rounding, quantize, gate, norm, norm_eps, residual = options
    y: mx.array = _kernel()(
        x, projections, eps, rounding == "half_away", quantize, gate or "", norm, norm_eps, residual
    )
    return y


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, norm, residual, *rest = arrays
    eps, half_away, quantize, gate, norm_eps = options
    projections = tuple(Projection(*rest[n : n + 3]) for n in range(0, len(rest), 3))
    rounding: Rounding = "half_away" if half_away else "half_even"
    given = Options(eps, rounding, quantize, gate or None, norm, norm_eps, residual)
    return [reference.run(x, projections, given)]


_kernel = native_kernel("bit_linear", _definition)

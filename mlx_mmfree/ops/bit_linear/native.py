"""`bit_linear` on the CPU in C++: one pass over the weights, everything else in its registers."""

import mlx.core as mx

from ...native import kernels, unavailable
from ..activations import Activation
from ..float_dtypes import FLOATS
from ..rms_norm_quantize import Rounding
from . import Projection


def unsupported(
    x: mx.array,
    projections: tuple[Projection, ...],
    eps: float | None,
    rounding: Rounding,
    quantize: bool,
    gate: Activation | None,
    norm: mx.array | None,
    norm_eps: float | None,
    residual: mx.array | None,
) -> str | None:
    if mx.default_device() != mx.Device(mx.cpu):
        return "the default device is not the CPU"
    if x.dtype not in FLOATS:
        return f"'x' is {x.dtype}"
    return unavailable()


def run(
    x: mx.array,
    projections: tuple[Projection, ...],
    eps: float | None,
    rounding: Rounding,
    quantize: bool,
    gate: Activation | None,
    norm: mx.array | None,
    norm_eps: float | None,
    residual: mx.array | None,
) -> mx.array:
    y: mx.array = kernels().bit_linear(
        x, projections, eps, rounding == "half_away", quantize, gate or "", norm, norm_eps, residual
    )
    return y

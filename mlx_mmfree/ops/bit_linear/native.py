"""`bit_linear` on the CPU in C++: one pass over the weights, everything else in its registers."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from ...native import kernels
from ..activations import Activation
from ..backend.dispatch import use_any_backend
from ..float_dtypes import FLOATS
from ..rms_norm_quantize import Rounding
from . import Options, Projection, reference


def unsupported(x: mx.array, projections: tuple[Projection, ...], options: Options) -> str | None:
    if x.dtype not in FLOATS:
        return f"'x' is {x.dtype}"
    return None


def run(x: mx.array, projections: tuple[Projection, ...], options: Options) -> mx.array:
    eps, rounding, quantize, gate, norm, norm_eps, residual = options
    y: mx.array = _kernel()(
        x, projections, eps, rounding == "half_away", quantize, gate or "", norm, norm_eps, residual
    )
    return y


@cache
def _kernel() -> Callable[..., Any]:
    kernels().define_bit_linear(_definition)
    product: Callable[..., Any] = kernels().bit_linear
    return product


def _definition(
    arrays: list[mx.array],
    count: int,
    eps: float | None,
    half_away: bool,
    quantize: bool,
    gate: Activation | None,
    norm_eps: float | None,
    has_residual: bool,
) -> tuple[mx.array]:
    x, *rest = arrays
    size = 2 if eps is None else 3
    projections = tuple(Projection(*rest[size * n : size * (n + 1)]) for n in range(count))
    rest = rest[size * count :]
    norm = None if norm_eps is None else rest.pop(0)
    residual = rest.pop(0) if has_residual else None
    rounding: Rounding = "half_away" if half_away else "half_even"
    options = Options(eps, rounding, quantize, gate or None, norm, norm_eps, residual)
    with use_any_backend():
        return (reference.run(x, projections, options),)

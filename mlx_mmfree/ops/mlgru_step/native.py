"""`mlgru_step` on the CPU in C++: gates, state and output in one pass."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from ...native import kernels
from ..backend.dispatch import use_any_backend
from ..float_dtypes import FLOATS
from . import Options, reference


def unsupported(gates: mx.array, state: mx.array, weight: mx.array, options: Options) -> str | None:
    if gates.dtype not in FLOATS:
        return f"'gates' are {gates.dtype}"
    if options.starts is not None:
        return "'starts' are given"
    return None


def run(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    y, last = _kernel()(gates, state, weight, options.eps, options.lower_bound, options.valid)
    return y, last


@cache
def _kernel() -> Callable[..., Any]:
    kernels().define_mlgru_step(_definition)
    step: Callable[..., Any] = kernels().mlgru_step
    return step


def _definition(
    arrays: list[mx.array], eps: float, has_lower_bound: bool, has_valid: bool
) -> tuple[mx.array, mx.array]:
    gates, state, weight, *rest = arrays
    lower_bound = rest.pop(0) if has_lower_bound else None
    valid = rest.pop(0) if has_valid else None
    with use_any_backend():
        return reference.run(gates, state, weight, Options(eps, lower_bound, valid))

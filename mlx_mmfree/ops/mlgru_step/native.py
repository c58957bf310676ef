"""`mlgru_step` on the CPU in C++, with gates, state and output in one pass."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import Options, reference

CHECKS_ARGUMENTS = True


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


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    gates, state, weight, lower_bound, valid = arrays
    return reference.run(gates, state, weight, Options(options[0], lower_bound, valid))


_kernel = native_kernel("mlgru_step", _definition)

"""`attention_step` on the CPU in C++: each key and value is read once for all heads that share it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from ...native import kernels
from ..backend.dispatch import use_any_backend
from ..float_dtypes import FLOATS
from . import Options, reference


def unsupported(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> str | None:
    for array in (projected, keys, values, options.query_norm, options.key_norm):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if options.wavelengths is not None and options.wavelengths.dtype != mx.float32:
        return f"'wavelengths' are {options.wavelengths.dtype}"
    return None


def run(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    *others, window, sinks = options
    y, keys, values, positions = _kernel()(
        projected, keys, values, positions, *others, window or 0, sinks
    )
    return y, keys, values, positions


@cache
def _kernel() -> Callable[..., Any]:
    kernels().define_attention_step(_definition)
    step: Callable[..., Any] = kernels().attention_step
    return step


def _definition(
    arrays: list[mx.array],
    num_heads: int,
    has_wavelengths: bool,
    is_interleaved: bool,
    has_norms: bool,
    norm_eps: float,
    window: int,
    sinks: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    projected, keys, values, positions, *rest = arrays
    wavelengths = rest.pop(0) if has_wavelengths else None
    query_norm, key_norm = rest if has_norms else (None, None)
    options = Options(
        num_heads,
        wavelengths,
        is_interleaved,
        query_norm,
        key_norm,
        norm_eps,
        window or None,
        sinks,
    )
    with use_any_backend():
        return reference.run(projected, keys, values, positions, options)

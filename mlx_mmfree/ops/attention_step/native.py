"""`attention_step` on the CPU in C++. Each key and value is read once for all heads that share it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import Options, reference

CHECKS_ARGUMENTS = True


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
    *others, window, sinks, _ = options
    y, keys, values, positions = _kernel()(
        projected, keys, values, positions, *others, window, sinks
    )
    return y, keys, values, positions


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    projected, keys, values, positions, wavelengths, query_norm, key_norm = arrays
    num_heads, is_interleaved, norm_eps, window, sinks = options
    given = Options(
        num_heads,
        wavelengths,
        is_interleaved,
        query_norm,
        key_norm,
        norm_eps,
        window or None,
        sinks,
    )
    return reference.run(projected, keys, values, positions, given)


_kernel = native_kernel("attention_step", _definition)

"""`attention_step` on the CPU in C++: each key and value is read once for all heads that share it."""

import mlx.core as mx

from ...native import kernels, unavailable
from ..float_dtypes import FLOATS


def unsupported(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    *,
    num_heads: int,
    wavelengths: mx.array | None,
    is_interleaved: bool,
    query_norm: mx.array | None,
    key_norm: mx.array | None,
    norm_eps: float,
    window: int | None,
    sinks: int,
) -> str | None:
    if mx.default_device() != mx.Device(mx.cpu):
        return "the default device is not the CPU"
    for array in (projected, keys, values, query_norm, key_norm):
        if array is not None and array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if wavelengths is not None and wavelengths.dtype != mx.float32:
        return f"'wavelengths' are {wavelengths.dtype}"
    return unavailable()


def run(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    *,
    num_heads: int,
    wavelengths: mx.array | None,
    is_interleaved: bool,
    query_norm: mx.array | None,
    key_norm: mx.array | None,
    norm_eps: float,
    window: int | None,
    sinks: int,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    y, keys, values, positions = kernels().attention_step(
        projected,
        keys,
        values,
        positions,
        num_heads,
        wavelengths,
        is_interleaved,
        query_norm,
        key_norm,
        norm_eps,
        window or 0,
        sinks,
    )
    return y, keys, values, positions

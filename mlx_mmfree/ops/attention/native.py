"""`attention` on the CPU in C++: tiles of queries meet runs of keys, and no score leaves the cache."""

import mlx.core as mx

from ...native import kernels
from ..backend.gradient import with_reference_gradient
from ..float_dtypes import FLOATS
from . import Mask, chunked


def unsupported(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> str | None:
    for array in (queries, keys, values):
        if array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return f"'mask' is {mask.dtype}"
    return None


def run(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    y: mx.array
    if isinstance(mask, mx.array):
        y = _masked(queries, keys, values, mask)
    else:
        y = (_causal if mask == "causal" else _full)(queries, keys, values)
    return y


_full = with_reference_gradient(
    lambda q, k, v: kernels().attention(q, k, v, None, False),
    lambda q, k, v: chunked.run(q, k, v, None),
)
_causal = with_reference_gradient(
    lambda q, k, v: kernels().attention(q, k, v, None, True),
    lambda q, k, v: chunked.run(q, k, v, "causal"),
)
_masked = with_reference_gradient(
    lambda q, k, v, mask: kernels().attention(q, k, v, mask, False), chunked.run
)

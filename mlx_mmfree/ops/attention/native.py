"""`attention` on the CPU in C++. Tiles of queries meet runs of keys, and no score leaves the cache.

This holds for the gradient too, which makes the weights of each tile anew. A query that sees nothing
adds nothing to it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from ..float_dtypes import FLOATS
from . import Mask, chunked


def unsupported(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> str | None:
    if bias is not None or sinks is not None:
        return "there is a bias or a sink"
    for array in (queries, keys, values):
        if array.dtype not in FLOATS:
            return f"an argument is {array.dtype}"
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        return f"'mask' is {mask.dtype}"
    return None


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    seen = mask if isinstance(mask, mx.array) else None
    y: mx.array = _kernel()(
        queries, keys, values, seen, mask == "causal" if seen is None else False
    )
    return y


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    queries, keys, values, mask, _, _, cotangent = arrays

    def definition(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return chunked.run(queries, keys, values, "causal" if options[0] else mask)

    gradients: list[mx.array] = mx.vjp(definition, [queries, keys, values], [cotangent])[1]
    return gradients


_kernel = native_kernel("attention", _gradient)

"""`gated_linear_attention` on the CPU in C++, chunk by chunk in the cache, and its gradient."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..backend.native_kernel import Arrays, native_kernel
from . import reference


def run(
    q: mx.array, k: mx.array, v: mx.array, f: mx.array | None, state: mx.array
) -> tuple[mx.array, mx.array]:
    arrays = (None if x is None else x.astype(mx.float32) for x in (q, k, v, f, state))
    o, last = _kernel()(*arrays)
    return o.astype(v.dtype), last


def _gradient(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    """The definition of the gradient, which has a kernel too, so that it can be differentiated."""
    q, k, v, state, d_o, d_last, f = arrays

    def definition(
        q: mx.array, k: mx.array, v: mx.array, state: mx.array, *f: mx.array
    ) -> list[mx.array]:
        return list(reference.run(q, k, v, f[0] if f else None, state))

    given = [x for x in (q, k, v, state, f) if x is not None]
    gradients: list[mx.array] = mx.vjp(definition, given, [d_o, d_last])[1]
    return gradients


_kernel = native_kernel("gated_linear_attention", _gradient)

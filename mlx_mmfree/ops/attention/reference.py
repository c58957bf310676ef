"""Definition of `attention` in plain float32 operations; heads that share keys are one product."""

import mlx.core as mx

from . import Mask


def unsupported(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> str | None:
    return None


def run(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
    batch, heads, length, dims = queries.shape
    groups, count = keys.shape[1:3]
    q, k, v = (x.astype(mx.float32) for x in (queries, keys, values))
    q = (q * dims**-0.5).reshape(batch, groups, -1, dims)
    scores = (q @ k.swapaxes(-1, -2)).reshape(batch, groups, -1, length, count)
    if isinstance(mask, str):
        mask = mx.arange(count) <= mx.arange(count - length, count)[:, None]
    if mask is not None:
        mask = mask if mask.ndim < 4 else mask[:, None]
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1).reshape(batch, groups, -1, count)
    return (weights @ v).reshape(batch, heads, length, -1).astype(queries.dtype)

"""Definition of `attention` in plain float32 operations. Heads that share keys are one product."""

import mlx.core as mx

from ..long_sums import long_sum
from . import Mask


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
    scores = scores.reshape(batch, groups, -1, count)
    weights = mx.exp(scores - mx.stop_gradient(mx.max(scores, axis=-1, keepdims=True)))
    y = (weights @ v) / long_sum(weights, axis=-1)[..., None]
    return y.reshape(batch, heads, length, -1).astype(queries.dtype)

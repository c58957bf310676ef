"""Definition of `attention` in plain float32 operations. Heads that share keys are one product."""

import mlx.core as mx

from ..long_sums import long_sum
from . import Mask


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    batch, heads, length, dims = queries.shape
    groups, count = keys.shape[1:3]
    q, k, v = (x.astype(mx.float32) for x in (queries, keys, values))
    q = (q * dims**-0.5).reshape(batch, groups, -1, dims)
    scores = (q @ k.swapaxes(-1, -2)).reshape(batch, groups, -1, length, count)
    if bias is not None:
        is_shared = bias.shape[1] == 1
        bias = bias[:, None] if is_shared else mx.unflatten(bias, 1, (groups, -1))
        scores = scores + bias.astype(mx.float32)
    if isinstance(mask, str):
        mask = mx.arange(count) <= mx.arange(count - length, count)[:, None]
    if mask is not None:
        mask = mask if mask.ndim < 4 else mask[:, None]
        scores = mx.where(mask, scores, -mx.inf)
    largest = mx.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(groups, -1, 1, 1)
        largest = mx.maximum(largest, sinks)
    largest = mx.stop_gradient(largest)
    weights = mx.exp(scores - largest).reshape(batch, groups, -1, count)
    total = long_sum(weights, axis=-1)[..., None]
    if sinks is not None:
        total = total + mx.exp(sinks - largest).reshape(total.shape)
    return ((weights @ v) / total).reshape(batch, heads, length, -1).astype(queries.dtype)

"""Definitions of `attention`: at once, and for a few queries at a time."""

from typing import Literal

import mlx.core as mx

from ..long_sums import long_sum

Mask = mx.array | Literal["causal"] | None


def reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The definition in plain operations."""
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


BLOCK = 256


def chunked(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """The same for a few queries at a time. With a causal mask, the keys after them are left out."""
    length, count = queries.shape[2], keys.shape[2]
    parts = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = count - length + stop if isinstance(mask, str) else count
        part = mask if isinstance(mask, str) else _part(mask, start, stop, seen)
        own = _part(bias, start, stop, seen)
        queried = queries[:, :, start:stop]
        y = reference(queried, keys[:, :, :seen], values[:, :, :seen], part, own, sinks)
        parts.append(y)
    return mx.concatenate(parts, axis=2)


def _part(scores: mx.array | None, start: int, stop: int, seen: int) -> mx.array | None:
    """The rows of some queries and the columns of the first keys, where there is more than one."""
    if scores is None:
        return None
    if scores.ndim > 1 and scores.shape[-2] > 1:
        scores = scores[..., start:stop, :]
    return scores[..., :seen] if scores.shape[-1] > 1 else scores

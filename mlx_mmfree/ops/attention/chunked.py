"""`attention` for a few queries at a time. With a causal mask, the keys behind them are left out."""

import mlx.core as mx

from . import Mask, reference

BLOCK = 256


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    length, count = queries.shape[2], keys.shape[2]
    parts = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        seen = count - length + stop if isinstance(mask, str) else count
        part = mask if isinstance(mask, str) else _part(mask, start, stop, seen)
        own = _part(bias, start, stop, seen)
        queried = queries[:, :, start:stop]
        y = reference.run(queried, keys[:, :, :seen], values[:, :, :seen], part, own, sinks)
        parts.append(y)
    return mx.concatenate(parts, axis=2)


def _part(scores: mx.array | None, start: int, stop: int, seen: int) -> mx.array | None:
    """The rows of some queries and the columns of the first keys, where there is more than one."""
    if scores is None:
        return None
    if scores.ndim > 1 and scores.shape[-2] > 1:
        scores = scores[..., start:stop, :]
    return scores[..., :seen] if scores.shape[-1] > 1 else scores

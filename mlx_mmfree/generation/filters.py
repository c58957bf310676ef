"""Filters of logits `(B, V)`: the tokens that must not be chosen get minus infinity."""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..ops import log_softmax, long_cumsum

Filter = Callable[[mx.array], mx.array]


def top_p(mass: float) -> Filter:
    """Keeps the fewest most likely tokens whose probabilities reach `mass` (arXiv 1904.09751)."""
    if not 0 < mass <= 1:
        raise ValueError(f"[top_p] 'top_p' must be above 0 and at most 1 but got {mass}.")

    def keep(logits: mx.array) -> mx.array:
        ordered = -mx.sort(-logits, axis=-1)
        probabilities = mx.exp(log_softmax(ordered))
        likelier = long_cumsum(probabilities) - probabilities
        kept = mx.sum(likelier < mass, axis=-1, keepdims=True)
        least = mx.take_along_axis(ordered, kept - 1, axis=-1)
        return mx.where(logits >= least, logits, -mx.inf)

    return keep


def min_p(share: float, min_tokens_to_keep: int = 1) -> Filter:
    """Keeps tokens at least `share` times as likely as the likeliest one (arXiv 2407.01082).

    Args:
        share: Between 0 and 1.
        min_tokens_to_keep: So many of the likeliest tokens stay in any case.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"[min_p] 'min_p' must be between 0 and 1 but got {share}.")
    if min_tokens_to_keep < 1:
        raise ValueError(
            f"[min_p] 'min_tokens_to_keep' must be at least 1 but got {min_tokens_to_keep}."
        )
    distance = math.log(share) if share else -math.inf

    def keep(logits: mx.array) -> mx.array:
        least = mx.max(logits, axis=-1, keepdims=True) + distance
        if min_tokens_to_keep > 1:
            count = min(min_tokens_to_keep, logits.shape[-1])
            likeliest = mx.topk(logits, count, axis=-1)
            least = mx.minimum(least, mx.min(likeliest, axis=-1, keepdims=True))
        return mx.where(logits >= least, logits, -mx.inf)

    return keep


def xtc(probability: float, threshold: float, exempt: Sequence[int] = ()) -> Filter:
    """Sometimes drops every token of probability above `threshold` but the least likely of them.

    Args:
        probability: How often a row is filtered, between 0 and 1.
        threshold: Between 0 and 0.5.
        exempt: Tokens that are never dropped, such as the end of text.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"[xtc] 'xtc_probability' must be between 0 and 1 but got {probability}.")
    if not 0 <= threshold <= 0.5:
        raise ValueError(f"[xtc] 'xtc_threshold' must be between 0 and 0.5 but got {threshold}.")

    def keep(logits: mx.array) -> mx.array:
        probabilities = mx.exp(log_softmax(logits))
        likely = mx.where(probabilities > threshold, probabilities, mx.inf)
        dropped = probabilities > mx.min(likely, axis=-1, keepdims=True)
        if exempt:
            ids = mx.arange(logits.shape[-1])[:, None]
            is_exempt = mx.any(ids == mx.array(list(exempt)), axis=-1)
            # not `&`, which MLX maps wrongly
            dropped = mx.logical_and(dropped, mx.logical_not(is_exempt))
        is_filtered = mx.random.uniform(shape=(*logits.shape[:-1], 1)) < probability
        return mx.where(mx.logical_and(is_filtered, dropped), -mx.inf, logits)

    return keep


def top_k(count: int) -> Filter:
    """Keeps the `count` most likely tokens, exactly so many also where logits are equal."""
    if count < 1:
        raise ValueError(f"[top_k] 'top_k' must be at least 1 but got {count}.")

    def keep(logits: mx.array) -> mx.array:
        if count >= logits.shape[-1]:
            return logits
        others = mx.argpartition(-logits, kth=count - 1, axis=-1)[..., count:]
        return mx.put_along_axis(logits, others, mx.array(-mx.inf, logits.dtype), axis=-1)

    return keep

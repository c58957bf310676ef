"""Filters of logits `(B, V)`: the tokens that must not be chosen get minus infinity.

Filters of equal arguments are equal, so that rows that share them are filtered together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..ops import log_softmax, long_cumsum

Filter = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class TopP:
    """Keeps the fewest most likely tokens whose probabilities reach `mass` (arXiv 1904.09751)."""

    mass: float

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise ValueError(f"[top_p] 'top_p' must be above 0 and at most 1 but got {self.mass}.")

    def __call__(self, logits: mx.array) -> mx.array:
        ordered = -mx.sort(-logits, axis=-1)
        probabilities = mx.exp(log_softmax(ordered))
        likelier = long_cumsum(probabilities) - probabilities
        kept = mx.sum(likelier < self.mass, axis=-1, keepdims=True)
        least = mx.take_along_axis(ordered, kept - 1, axis=-1)
        return mx.where(logits >= least, logits, -mx.inf)


@dataclass(frozen=True)
class MinP:
    """Keeps tokens at least `share` times as likely as the likeliest one (arXiv 2407.01082).

    Attributes:
        share: Between 0 and 1.
        min_tokens_to_keep: So many of the likeliest tokens stay in any case.
    """

    share: float
    min_tokens_to_keep: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"[min_p] 'min_p' must be between 0 and 1 but got {self.share}.")
        if self.min_tokens_to_keep < 1:
            raise ValueError(
                f"[min_p] 'min_tokens_to_keep' must be at least 1 but got {self.min_tokens_to_keep}."
            )

    def __call__(self, logits: mx.array) -> mx.array:
        distance = math.log(self.share) if self.share else -math.inf
        least = mx.max(logits, axis=-1, keepdims=True) + distance
        if self.min_tokens_to_keep > 1:
            count = min(self.min_tokens_to_keep, logits.shape[-1])
            likeliest = mx.topk(logits, count, axis=-1)
            least = mx.minimum(least, mx.min(likeliest, axis=-1, keepdims=True))
        return mx.where(logits >= least, logits, -mx.inf)


@dataclass(frozen=True)
class XTC:
    """Sometimes drops every token of probability above `threshold` but the least likely of them.

    Attributes:
        probability: How often a row is filtered, between 0 and 1.
        threshold: Between 0 and 0.5.
        exempt: Tokens that are never dropped, such as the end of text.
    """

    probability: float
    threshold: float
    exempt: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(
                f"[xtc] 'xtc_probability' must be between 0 and 1 but got {self.probability}."
            )
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(
                f"[xtc] 'xtc_threshold' must be between 0 and 0.5 but got {self.threshold}."
            )

    def __call__(self, logits: mx.array, chance: mx.array | None = None) -> mx.array:
        """The logits `(B, V)`, filtered where `chance` `(B, 1)`, uniform, is below the probability."""
        probabilities = mx.exp(log_softmax(logits))
        likely = mx.where(probabilities > self.threshold, probabilities, mx.inf)
        dropped = probabilities > mx.min(likely, axis=-1, keepdims=True)
        if self.exempt:
            ids = mx.arange(logits.shape[-1])[:, None]
            is_exempt = mx.any(ids == mx.array(list(self.exempt)), axis=-1)
            # not `&`, which MLX maps wrongly
            dropped = mx.logical_and(dropped, mx.logical_not(is_exempt))
        if chance is None:
            chance = mx.random.uniform(shape=(*logits.shape[:-1], 1))
        is_filtered = chance < self.probability
        return mx.where(mx.logical_and(is_filtered, dropped), -mx.inf, logits)


@dataclass(frozen=True)
class TopK:
    """Keeps the `count` most likely tokens, exactly so many also where logits are equal."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"[top_k] 'top_k' must be at least 1 but got {self.count}.")

    def __call__(self, logits: mx.array) -> mx.array:
        if self.count >= logits.shape[-1]:
            return logits
        others = mx.argpartition(-logits, kth=self.count - 1, axis=-1)[..., self.count :]
        return mx.put_along_axis(logits, others, mx.array(-mx.inf, logits.dtype), axis=-1)

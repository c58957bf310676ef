"""Draws the next tokens of many texts, with their log-probabilities."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from ...ops import cross_entropy
from ..sampling import Draw
from .requests import TokenLogprobs
from .rows import Row


class Logprobs:
    """The log-probabilities of one step, yet to be computed.

    Args:
        logits: The model's logits, float32 `(B, V)`.
        chosen: The tokens, `(B,)`.
        counts: How many of the likeliest tokens each row asks for, by the rows that do, one at least.
    """

    def __init__(self, logits: mx.array, chosen: mx.array, counts: dict[int, int]):
        self._counts = counts
        rows = mx.array(list(counts))
        logits, tokens = logits[rows], chosen[rows]
        own = -cross_entropy(logits, tokens.astype(mx.int32))
        likeliest = _likeliest(logits, max(counts.values()))
        # what a log-probability differs by from its logit
        total = mx.take_along_axis(logits, tokens[:, None], axis=-1) - own[:, None]
        theirs = mx.take_along_axis(logits, likeliest, axis=-1) - total
        self.arrays = [tokens, own, likeliest, theirs]

    def rows(self) -> dict[int, TokenLogprobs]:
        """By the rows that asked for them; waits until they are computed."""
        tokens, own, likeliest, theirs = (cast(list, array.tolist()) for array in self.arrays)
        return {
            row: TokenLogprobs(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for (row, count), token, logprob, ids, values in zip(
                self._counts.items(), tokens, own, likeliest, theirs, strict=True
            )
        }


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """The likeliest tokens `(B, count)`, first to last."""
    if not count:
        return mx.zeros((logits.shape[0], 0), mx.uint32)
    found = mx.argpartition(-logits, kth=count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(logits, found, axis=-1), axis=-1)
    return mx.take_along_axis(found, order, axis=-1)


def drawn(sampler: Draw, logits: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    """The next keys `(B, 2)`, and the tokens `(B,)` that each row draws with its own."""
    pairs = mx.vmap(mx.random.split)(keys)
    chances = mx.vmap(lambda key: mx.random.uniform(shape=(2,), key=key))(pairs[:, 1])
    return pairs[:, 0], sampler.at(logits, chances).astype(mx.uint32)


@dataclass(frozen=True)
class Choice:
    """The tokens that the rows of a step chose, yet to be computed.

    Attributes:
        rows: The rows of the batch at that step.
        tokens: One for each, `(B,)`.
        finite: Whether the logits of each were finite, `(B,)`.
        failures: Why some rows have no token.
        logprobs: Those that the rows asked for; `None`: they asked for none.
    """

    rows: list[Row]
    tokens: mx.array
    finite: mx.array
    failures: dict[int, Exception]
    logprobs: Logprobs | None

"""The log-probabilities of chosen tokens and of the likeliest ones."""

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from ...ops import cross_entropy
from .request import TokenLogprobs


class Logprobs:
    """Those of one step, yet to be computed.

    Args:
        logits: Those of the model, float32 `(B, V)`.
        chosen: The tokens, `(B,)`.
        wanted: How many of the likeliest tokens each row asks for; `None`: it asks for nothing.
    """

    def __init__(self, logits: mx.array, chosen: mx.array, wanted: Sequence[int | None]):
        self._counts = {place: count for place, count in enumerate(wanted) if count is not None}
        self.arrays: list[mx.array] = []
        if not self._counts:
            return
        places = mx.array(list(self._counts))
        logits, tokens = logits[places], chosen[places]
        own = -cross_entropy(logits, tokens.astype(mx.int32))
        likeliest = _likeliest(logits, max(self._counts.values()))
        # what a log-probability differs by from its logit
        total = mx.take_along_axis(logits, tokens[:, None], axis=-1) - own[:, None]
        theirs = mx.take_along_axis(logits, likeliest, axis=-1) - total
        self.arrays = [tokens, own, likeliest, theirs]

    def rows(self) -> dict[int, TokenLogprobs]:
        """By the rows that asked for them; waits until they are computed."""
        if not self._counts:
            return {}
        tokens, own, likeliest, theirs = (cast(list, array.tolist()) for array in self.arrays)
        return {
            place: TokenLogprobs(
                token, logprob, tuple(zip(ids[:count], values[:count], strict=True))
            )
            for (place, count), token, logprob, ids, values in zip(
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

"""Measures on held-out samples: the errors of windows, and the losses of models."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ...models import Decoder
from ...ops import cross_entropy, long_sum
from .streams import OpenStream

MOST_LOGITS = 2**24
"""The most logits that are in memory at a time, unless one token has more."""


def token_losses(
    model: Decoder, stream: OpenStream, rows: range, tokens: np.ndarray, dtype: mx.Dtype
) -> float:
    """The mean cross-entropy of the next tokens, in nats, from the stream after the last block.

    Args:
        model: Gives the last norm and the head.
        stream: The stream.
        rows: The samples.
        tokens: The tokens of all samples, int32 `(samples, L + 1)`.
        dtype: What to compute in.
    """
    total, width = 0.0, max(1, MOST_LOGITS // model.num_logits)
    for row in rows:
        hidden = model.norm(stream[row : row + 1].astype(dtype))
        for start in range(0, hidden.shape[1], width):
            logits = model.logits(hidden[:, start : start + width])
            wanted = mx.array(tokens[row : row + 1, 1:][:, start : start + width])
            total += float(long_sum(cross_entropy(logits, wanted)))
    return total / (len(rows) * (tokens.shape[1] - 1))


def squared_errors(
    window: Callable[[mx.array], mx.array],
    inputs: OpenStream,
    targets: OpenStream,
    rows: range,
    batch_size: int,
) -> float:
    r"""How far a window is from the dense layers on some samples.

    .. math::
        \sum \lVert y - y^\ast \rVert^2 \Big/ \sum \lVert y^\ast - \overline{y^\ast} \rVert^2

    with the mean of the targets over all tokens. A window that gives this mean has an error of 1.
    """
    wrong, spread = 0.0, Spread()
    for start in range(rows.start, rows.stop, batch_size):
        part = slice(start, min(start + batch_size, rows.stop))
        wanted = targets[part].astype(mx.float32)
        got = window(inputs[part]).astype(mx.float32)
        wrong += float(long_sum((got - wanted).square()))
        spread.add(wanted)
    return wrong / max(spread.total, 1e-12)


class Spread:
    """The squared distances of tokens from their mean, added up batch by batch in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: Any = 0.0
        self._squares: Any = 0.0

    def add(self, x: mx.array) -> None:
        rows = np.array(x.astype(mx.float32)).reshape(-1, x.shape[-1])
        # float32 squares of large activations would swallow small ones
        self._count += len(rows)
        self._sums = self._sums + rows.sum(axis=0, dtype=np.float64)
        self._squares = self._squares + np.square(rows, dtype=np.float64).sum(axis=0)

    @property
    def total(self) -> float:
        return float((self._squares - self._sums**2 / max(self._count, 1)).sum())

    @property
    def deviation(self) -> float:
        """The root of their mean over tokens and dims."""
        return float(np.sqrt(max(self.total, 1e-12) / (self._count * len(self._sums))))

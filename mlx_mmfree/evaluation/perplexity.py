"""Cross-entropy of a language model on a token stream."""

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np


@dataclass(frozen=True)
class Perplexity:
    """Cross-entropy over a text.

    Attributes:
        nats: Sum of the negative log-likelihoods of the predicted tokens.
        tokens: Number of predicted tokens.
        size_bytes: UTF-8 bytes of the text.
    """

    nats: float
    tokens: int
    size_bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, a token."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text, comparable between vocabularies."""
        return self.nats / math.log(2) / self.size_bytes


def measure_perplexity(
    model: nn.Module,
    tokens: np.ndarray,
    size_bytes: int,
    *,
    length: int = 256,
    batch_size: int = 16,
) -> Perplexity:
    """Cross-entropy of consecutive windows, each read from an empty state.

    Every token but the first is predicted exactly once.

    Args:
        model: Maps `(B, L)` tokens to logits and state.
        tokens: The ids of the text, in order.
        size_bytes: UTF-8 bytes of the text.
        length: Predictions a window.
        batch_size: Windows at a time.
    """
    rows = [tokens[start : start + length + 1] for start in range(0, len(tokens) - 1, length)]
    nats = 0.0
    for first in range(0, len(rows), batch_size):
        group = rows[first : first + batch_size]
        width = len(group[0])
        # The last window may be shorter: its row is padded and the padding left out of the sum.
        batch = mx.array(np.stack([np.pad(row, (0, width - len(row))) for row in group]))
        counted = mx.array([[len(row) - 1] for row in group]) > mx.arange(width - 1)
        logits, _ = model(batch[:, :-1])
        losses = nn.losses.cross_entropy(logits.astype(mx.float32), batch[:, 1:])
        nats += float(mx.sum(mx.where(counted, losses, 0.0)))
    return Perplexity(nats, len(tokens) - 1, size_bytes)

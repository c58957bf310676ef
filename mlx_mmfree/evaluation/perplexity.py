"""Cross-entropy of a language model on a token stream."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..generation.finite import are_finite, check_finite
from ..models import Decoder
from ..ops import cross_entropy

LOGITS_AT_A_TIME = 2**25
"""So many numbers a head makes at most before they are used up."""


@dataclass(frozen=True)
class Perplexity:
    """Cross-entropy over a text.

    Attributes:
        nats: Sum of the negative log-likelihoods of the predicted tokens.
        squared_nats: Sum of their squares.
        tokens: Number of predicted tokens.
        size_bytes: UTF-8 bytes of the text.
    """

    nats: float
    squared_nats: float
    tokens: int
    size_bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, a token; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def standard_error(self) -> float:
        r"""Of the perplexity, to first order, as if the tokens were drawn independently.

        .. math::
            e^{\bar x} \sqrt{\frac{1}{n (n - 1)} \sum_i (x_i - \bar x)^2}

        for the negative log-likelihoods `x` of `n` tokens; not a number for a single one.
        """
        if self.tokens < 2:
            return math.nan
        squares = max(self.squared_nats - self.nats * self.loss, 0.0)
        return self.perplexity * math.sqrt(squares / (self.tokens * (self.tokens - 1)))

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text, comparable between vocabularies."""
        return self.nats / math.log(2) / self.size_bytes


def is_recurrent(model: Decoder) -> bool:
    """Whether the model's state has a constant size."""
    return all(block.token_mixer.recurrent for block in model.blocks)


def measure_perplexity(
    model: Decoder,
    tokens: np.ndarray,
    size_bytes: int,
    *,
    length: int = 256,
    batch_size: int = 16,
    carries_state: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Perplexity:
    """Cross-entropy of consecutive windows.

    Every token but the first is predicted exactly once.

    Args:
        model: Maps `(B, L)` tokens to hidden vectors and state, and those to logits.
        tokens: The ids of the text, in order.
        size_bytes: UTF-8 bytes of the text.
        length: Predictions a window.
        batch_size: Windows at a time, where each is read from an empty state.
        carries_state: A window goes on from the state of the one before, so that each token is
            predicted from all of the text before it.
        progress: Called with the number of tokens predicted since the last call.

    Raises:
        NumericalError: The model's logits are not finite, or all zero.
    """
    rows = [tokens[start : start + length + 1] for start in range(0, len(tokens) - 1, length)]
    group_size = 1 if carries_state else batch_size
    state: Any = None
    nats = squared_nats = 0.0
    for first in range(0, len(rows), group_size):
        group = rows[first : first + group_size]
        width = len(group[0])
        # The last window may be shorter: its row is padded and the padding left out of the sum.
        batch = mx.array(np.stack([np.pad(row, (0, width - len(row))) for row in group]))
        counted = mx.array([[len(row) - 1] for row in group]) > mx.arange(width - 1)
        hidden, new_state = model.hidden(batch[:, :-1], state)
        losses = _losses(model, hidden, batch[:, 1:])[np.array(counted).reshape(-1)]
        if carries_state:
            mx.eval(new_state)
            state = new_state
        nats += float(losses.sum())
        squared_nats += float(np.square(losses).sum())
        if progress is not None:
            progress(len(losses))
    return Perplexity(nats, squared_nats, len(tokens) - 1, size_bytes)


def _losses(model: Decoder, hidden: mx.array, targets: mx.array) -> np.ndarray:
    """The negative log-likelihood of each target, `(B * L,)` in float64."""
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    step = max(1, LOGITS_AT_A_TIME // model.vocab_size)
    losses = []
    for first in range(0, len(targets), step):
        logits = model.logits(hidden[first : first + step])
        part, finite = cross_entropy(logits, targets[first : first + step]), are_finite(logits)
        mx.eval(part, finite)
        check_finite(cast(bool, finite.item()))
        losses.append(np.array(part, np.float64))
    return np.concatenate(losses)

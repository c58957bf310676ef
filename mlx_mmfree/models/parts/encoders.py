"""Models that read a whole text: what fills in words that are left out, and what classifies."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

from ...layers.attention.positions import AddedPositions
from ...layers.context import Context
from ...layers.embedding import known_rows
from ...ops.long_sums import long_sum
from .block import Block, ReversibleBlock
from .stack import TokenModel


class MaskedLM(TokenModel):
    """Fills in tokens that are left out of a text (BERT, Devlin et al., arXiv 1810.04805).

    Args: as of `TokenModel`; the token mixers are built to see the whole sequence.

    Shape:
        `tokens`: integers `(B, L)`; `valid`: booleans `(B, L)`, `False` where padded; logits
        `(B, L, V)`.

    Example:
        >>> blocks = [Block(32, GQA(32, is_causal=False), SwiGLU(32))]
        >>> model = MaskedLM(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> model(mx.array([[1, 2, 3]])).shape
        (1, 3, 100)
    """

    purpose = "filling in masked tokens"
    command = "fill"

    def hidden(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        """The normed residual stream before the head, `(B, L, D)`."""
        return self.transform(known_rows(self.embed, tokens), Context(valid))

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens)

    def __call__(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        return self.logits(self.hidden(tokens, valid))


Pooling = Literal["first", "last", "mean"]


class SequenceClassifier(TokenModel):
    r"""Embedding, blocks, norm, one vector of each text, head.

    .. math::
        y = W\,\mathrm{pool}_t\big(\mathrm{norm}(x_t)\big)

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm before the head.
        head: Maps `(B, D)` to `(B, C)`, a logit for each class.
        config: The architecture's configuration.
        positions: Adds positions to the embedded tokens; `None`: nothing does.
        pooling: The vector of a text is that of its first token, as in BERT (arXiv 1810.04805), that
            of its last, as causal models need it, or the mean of all.

    Shape:
        `tokens`: integers `(B, L)`; `valid`: booleans `(B, L)`, `False` where padded; logits `(B, C)`.

    Raises:
        ValueError: The pooling is unknown.

    Example:
        >>> blocks = [Block(32, GQA(32, is_causal=False), SwiGLU(32))]
        >>> embed, head = nn.Embedding(100, 32), nn.Linear(32, 4)
        >>> model = SequenceClassifier(embed, blocks, nn.RMSNorm(32), head)
        >>> model(mx.array([[1, 2, 3]])).shape
        (1, 4)
    """

    purpose = "sorting texts into classes"
    command = "classify"

    def __init__(
        self,
        embed: nn.Embedding,
        blocks: Sequence[Block | ReversibleBlock],
        norm: nn.Module,
        head: nn.Module,
        config: Any = None,
        positions: AddedPositions | None = None,
        *,
        pooling: Pooling = "mean",
    ):
        if pooling not in get_args(Pooling):
            known = ", ".join(map(repr, get_args(Pooling)))
            raise ValueError(
                f"[SequenceClassifier] 'pooling' must be one of {known} but got {pooling!r}."
            )
        super().__init__(embed, blocks, norm, head, config, positions)
        self._pooling = pooling

    @property
    def num_logits(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def labels(self) -> list[str]:
        """The names of the classes, or their numbers where the configuration names none."""
        names = getattr(self.config, "labels", ())
        return list(names) or [str(number) for number in range(self.num_logits)]

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens)

    def __call__(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        return self.logits(self.hidden(tokens, valid))

    def hidden(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        """The vector of each text that the head reads, `(B, D)`."""
        return self._pooled(self.transform(known_rows(self.embed, tokens), Context(valid)), valid)

    def _pooled(self, x: mx.array, valid: mx.array | None) -> mx.array:
        """The vector of each text, `(B, D)`."""
        batch, length, _ = x.shape
        real = mx.ones((batch, length)) if valid is None else valid.astype(mx.float32)
        if self._pooling == "mean":
            numbers = (x * real[..., None]).swapaxes(1, 2)
            return (long_sum(numbers, axis=-1) / long_sum(real, axis=-1)[:, None]).astype(x.dtype)
        place = mx.arange(length)
        if self._pooling == "first":
            chosen = mx.argmax(real, axis=1)
        else:
            chosen = mx.argmax(real * (place + 1), axis=1)
        return mx.take_along_axis(x, chosen[:, None, None], axis=1).squeeze(1)

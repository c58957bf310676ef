"""A causal language model made of blocks."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers import apply_head
from ...layers.embedding import embed_tokens
from ...layers.token_mixer import State
from ...ops.ternary import ROUNDING_VERSION
from .block import Block
from .tokens import known_rows


class Decoder(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration, kept as the attribute `config`.

    Attributes:
        rounding: How its packed weights were made of floats, as `hub.checkpoint.writer_record` has it.

    Shape:
        `tokens`: integers `(B, L)`, of which one outside the vocabulary makes its row NaN from there on;
        `valid`: booleans `(B, L)`, `False` where padded; `starts`: booleans `(B, L)`, `True` where
        another sample begins in the row; logits `(B, L, V)`.

    State:
        A tuple with the state of each block; every array has the batch on axis 0.
    """

    def __init__(
        self,
        embed: nn.Embedding,
        blocks: Sequence[Block],
        norm: nn.Module,
        head: nn.Module | None = None,
        config: Any = None,
    ):
        super().__init__()
        self.embed = embed
        self.blocks = list(blocks)
        self.norm = norm
        if head is not None:
            self.head = head
        self.config = config
        self.rounding: int | str | None = ROUNDING_VERSION

    @property
    def vocab_size(self) -> int:
        return int(self.embed.weight.shape[0])

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the residual stream."""
        return self.embed(mx.zeros((1,), mx.int32)).dtype

    def init_state(self, batch_size: int) -> tuple[State, ...]:
        return tuple(block.init_state(batch_size, self.dtype) for block in self.blocks)

    def context(self) -> list[dict[str, mx.array]]:
        """What each block's token mixer is given beside its input; it depends on weights alone."""
        return [{}] * len(self.blocks)

    def hidden(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        context: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The normed residual stream before the head, `(B, L, D)`, and the new state.

        The tokens are taken as they are: their caller has checked them on the host, as a generator
        does. `context` is that of `context()`, to be given by a caller who has computed it before.
        """
        return self._read(
            embed_tokens(self.embed, tokens), state, valid, starts=starts, context=context
        )

    def _read(
        self,
        x: mx.array,
        state: tuple[State, ...] | None,
        valid: mx.array | None,
        *,
        starts: mx.array | None,
        context: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        context = self.context() if context is None else context
        if starts is not None:
            context = [{**given, "starts": starts} for given in context]
        state = self.init_state(x.shape[0]) if state is None else state
        new_state = []
        for block, given, old in zip(self.blocks, context, state, strict=True):
            x, new = block(x, old, valid, **given)
            new_state.append(new)
        return self.norm(x), tuple(new_state)

    def logits(self, hidden: mx.array) -> mx.array:
        """The head, applied to what `hidden` returns."""
        return apply_head(self.head if "head" in self else self.embed, hidden)

    def __call__(
        self,
        tokens: mx.array,
        state: tuple[State, ...] | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        x, state = self._read(known_rows(self.embed, tokens), state, valid, starts=starts)
        return self.logits(x), state

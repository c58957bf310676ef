"""What language models of every kind share: an embedding before their blocks, and a head."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers import apply_head
from ...layers.attention.positions import AddedPositions, AxialPositions, LearnedPositions
from ...layers.matrix import matrix_of
from ...layers.mixer import State, TokenMixer
from ...ops.ternary import ROUNDING_VERSION
from .block import Block, ReversibleBlock
from .stack import Stack


class TokenModel(Stack):
    r"""Embedding, blocks, norm, head.

    .. math::
        z = W\,\mathrm{norm}\big(
        \mathrm{block}_n(\ldots\mathrm{block}_1(\mathrm{embed}(\mathrm{tokens})))\big)

    Source: MetaFormer (Yu et al., arXiv 2111.11418), with tokens in the place of patches.

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration, kept as the attribute `config`.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Attributes:
        purpose: What such a model is for, in the words of an error message.
        command: The command that uses such a model.
        rounding: How its packed weights were made of floats, as `hub.checkpoint.checkpoint` has it.

    Shape:
        `tokens`: integers `(B, L)`; logits `(B, L, V)`, or `(B, C)` of a classifier.

    Example:
        >>> block = Block(32, MLGRU(32), SwiGLU(32))
        >>> model = Decoder(nn.Embedding(100, 32), [block], nn.RMSNorm(32))
        >>> isinstance(model, TokenModel), model.vocab_size, model.dims
        (True, 100, 32)
    """

    purpose = ""
    command = ""

    def __init__(
        self,
        embed: nn.Embedding,
        blocks: Sequence[Block | ReversibleBlock],
        norm: nn.Module,
        head: nn.Module | None = None,
        config: Any = None,
        positions: AddedPositions | None = None,
    ):
        # first, so that weights are drawn in the order of the computation
        nn.Module.__init__(self)
        self.embed = embed
        super().__init__(blocks, norm, positions)
        if head is not None:
            self.head = head
        self.config = config
        self.rounding: int | str | None = ROUNDING_VERSION

    @property
    def vocab_size(self) -> int:
        return int(self.embed.weight.shape[0])

    @property
    def dims(self) -> int:
        """Model dims D."""
        return int(self.embed.weight.shape[1])

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text, where a mixer or a table of positions ends; `None`: none does."""
        modules = self.modules()
        tables = (LearnedPositions, AxialPositions)
        bounds = [module.max_length for module in modules if isinstance(module, tables)]
        if any(isinstance(module, TokenMixer) and module.length_bound for module in modules):
            bounds.append(self.config.max_position_embeddings)
        return min(bounds, default=None)

    @property
    def context_length(self) -> int | None:
        """The most tokens of a text that the model was made for; `None`: any number.

        A longer text can be read unless `max_length` forbids it, but what is said of it means little. A
        recurrence that no positions are added to reads texts of any length.
        """
        mixers = self.token_mixers
        counts_on = "positions" not in self and all(mixer.recurrent for mixer in mixers)
        made_for = None if counts_on else getattr(self.config, "max_position_embeddings", None)
        bounds = (self.max_length, made_for)
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the residual stream."""
        return self.embed(mx.zeros((1,), mx.int32)).dtype

    def init_state(self, batch_size: int, dtype: mx.Dtype | None = None) -> tuple[State, ...]:
        return super().init_state(batch_size, self.dtype if dtype is None else dtype)

    def predictions(self, tokens: mx.array) -> mx.array:
        """The logits for tokens `(B, L)`, whatever else the model takes or returns when it is called."""
        raise NotImplementedError

    @property
    def num_logits(self) -> int:
        """How many logits the head gives at a time."""
        return self.vocab_size

    @property
    def head_modules(self) -> list[nn.Module]:
        """The modules whose parameters the logits depend on."""
        if "head" not in self:
            return [self.embed]
        matrix = matrix_of(self.head)
        is_shared = matrix is None or matrix.storage == "elsewhere"
        return [self.embed, self.head] if is_shared else [self.head]

    def logits(self, hidden: mx.array) -> mx.array:
        """The head, applied to the normed residual stream."""
        return apply_head(self.head if "head" in self else self.embed, hidden)

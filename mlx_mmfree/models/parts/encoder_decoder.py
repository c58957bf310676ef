"""A model that turns one text into another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers.attention.positions import AddedPositions
from ...layers.context import Context
from ...layers.embedding import known_rows
from ...layers.mixer import State
from .block import Block, ReversibleBlock
from .stack import Stack, TokenModel

SEARCH_KEYS = frozenset(
    (
        "num_beams",
        "length_penalty",
        "early_stopping",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "bad_words_ids",
        "renormalize_logits",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "no_repeat_ngram_size",
        "repetition_penalty",
        "decoder_start_token_id",
    )
)
"""What files say of a search, by transformers' names."""


@dataclass(frozen=True)
class SearchFiles:
    """What a model's files say of how its publishers search for a target, by transformers' names.

    Attributes:
        generation: The content of `generation_config.json`.
        config: That of `config.json`, where older models have it.
    """

    generation: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


class EncoderDecoder(TokenModel):
    """Reads a source text as a whole and writes a target text token by token (arXiv 1706.03762).

    The target is read by blocks that also see the source: each has a memory mixer, or a token mixer
    that takes a second sequence.

    Args:
        embed: The embedding of both texts, `(V, D)`.
        encoder: Reads the source.
        blocks: The blocks that read the target, first to last.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration. To write a target, it must name `eos_token_id`, the
            token after the last, `num_beams` and `max_position_embeddings`.
        positions: Adds positions to the target; the encoder has its own.

    Attributes:
        search_files: What its files say of how its publishers search for a target.

    Shape:
        `source`: integers `(B, M)`; `tokens`: integers `(B, L)`; `source_valid` and `valid`: booleans
        of the same shapes, `False` where padded; logits `(B, L, V)`.

    State:
        That of the blocks that read the target. Give it back together with what `encode` returned.

    Example:
        >>> from mlx_mmfree.token_mixers import MultiHeadAttention
        >>> reads = Block(32, MultiHeadAttention(32, is_causal=False), SwiGLU(32))
        >>> writes = Block(32, GQA(32), SwiGLU(32), memory_mixer=MultiHeadAttention(32))
        >>> encoder = Stack([reads], nn.RMSNorm(32))
        >>> model = EncoderDecoder(nn.Embedding(100, 32), encoder, [writes], nn.RMSNorm(32))
        >>> logits, state = model(mx.array([[1, 2, 3]]), mx.array([[4, 5]]))
        >>> logits.shape
        (1, 2, 100)
    """

    purpose = "turning one text into another"
    command = "translate"

    @property
    def start_token_id(self) -> int:
        """The token before the first of the target: the one that ends a text, as in fairseq."""
        return int(self.config.eos_token_id)

    @property
    def unwritten_tokens(self) -> tuple[int, ...]:
        """Tokens that no target holds."""
        return ()

    def __init__(
        self,
        embed: nn.Embedding,
        encoder: Stack,
        blocks: Sequence[Block | ReversibleBlock],
        norm: nn.Module,
        head: nn.Module | None = None,
        config: Any = None,
        positions: AddedPositions | None = None,
    ):
        super().__init__(embed, blocks, norm, head, config, positions)
        self.encoder = encoder
        self.search_files = SearchFiles()

    def encode(self, source: mx.array, source_valid: mx.array | None = None) -> mx.array:
        """What the target's blocks see of the source, `(B, M, D)`."""
        return self.encoder.transform(self.embedded(source), Context(source_valid))

    def embedded(self, tokens: mx.array) -> mx.array:
        """The tokens of either text as the first block takes them, `(B, L, D)`."""
        return known_rows(self.embed, tokens)

    def decode(
        self,
        tokens: mx.array,
        memory: mx.array,
        state: tuple[State, ...] | None = None,
        *,
        memory_valid: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """The logits for the target's next tokens, and the state after them."""
        x, state = self.read_target(tokens, memory, state, memory_valid=memory_valid, valid=valid)
        return self.logits(x), state

    def read_target(
        self,
        tokens: mx.array,
        memory: mx.array,
        state: tuple[State, ...] | None = None,
        *,
        memory_valid: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        """As `decode`, but the normed residual stream before the head, `(B, L, D)`."""
        x = self.embedded(tokens)
        state = self.init_state(x.shape[0]) if state is None else state
        return self.run(x, state, Context(valid, memory=memory, memory_valid=memory_valid))

    def predictions(self, tokens: mx.array) -> mx.array:
        return self(tokens, tokens)[0]

    def __call__(
        self,
        source: mx.array,
        tokens: mx.array,
        *,
        source_valid: mx.array | None = None,
        valid: mx.array | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        memory = self.encode(source, source_valid)
        return self.decode(tokens, memory, memory_valid=source_valid, valid=valid)

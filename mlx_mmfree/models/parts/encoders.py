"""Models that read a whole text: they fill words in, sort it into classes, or write another text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

from ...layers.attention.positions import AddedPositions
from ...layers.context import Context
from ...layers.embedding import known_rows
from ...layers.mixer import State
from ...ops.long_sums import long_sum
from .block import Block
from .reversible import ReversibleBlock
from .stack import Stack, TokenModel


class MaskedLM(TokenModel):
    """Fills in tokens that are left out of a text (BERT, Devlin et al., arXiv 1810.04805).

    Args:
        embed: The embedding, `(V, D)`.
        blocks: The blocks, first to last, whose token mixers are built to see the whole sequence.
        norm: The norm before the head.
        head: Maps `(..., D)` to `(..., V)`; `None` ties it to the embedding.
        config: The architecture's configuration, stored as the attribute `config`.
        positions: Adds positions to the embedded tokens; `None`: nothing does.

    Shape:
        `tokens`: integers `(B, L)`; `valid`: booleans `(B, L)`, `False` where padded; logits
        `(B, L, V)`.

    Example:
        >>> blocks = [Block(32, GQA(32, is_causal=False), SwiGLU(32))]
        >>> model = MaskedLM(nn.Embedding(100, 32), blocks, nn.RMSNorm(32))
        >>> model(mx.array([[1, 2, 3]])).shape
        (1, 3, 100)
    """

    pipeline = "fill-mask"
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
        pooling: The vector of a text is the vector of its first token, as in BERT (arXiv 1810.04805),
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

    pipeline = "text-classification"
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
        index = mx.arange(length)
        if self._pooling == "first":
            chosen = mx.argmax(real, axis=1)
        else:
            chosen = mx.argmax(real * (index + 1), axis=1)
        return mx.take_along_axis(x, chosen[:, None, None], axis=1).squeeze(1)


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
"""The settings of a search in files, by transformers' names."""


@dataclass(frozen=True)
class SearchFiles:
    """How a model's publishers search for a target, by transformers' names.

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

    pipeline = "translation"
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
        """The source as the target's blocks see it, `(B, M, D)`."""
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
        """Like `decode`, but the normed residual stream before the head, `(B, L, D)`."""
        x = self.embedded(tokens)
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

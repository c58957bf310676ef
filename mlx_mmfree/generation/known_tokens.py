"""Keeps out tokens that the tokenizer has no text for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..models import Decoder
from .penalties import LogitsProcessor


@dataclass(frozen=True)
class _KnownTokens:
    """Keeps out the rows of an embedding that is larger than the tokenizer's vocabulary."""

    count: int

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> tuple[()]:
        return ()

    def __call__(self, logits: mx.array, state: tuple[()]) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) < self.count, logits, -mx.inf)

    def update(self, state: tuple[()], tokens: mx.array) -> tuple[()]:
        return ()


def with_known_tokens(
    model: Decoder, tokenizer: Any, processors: Sequence[LogitsProcessor]
) -> list[LogitsProcessor]:
    """The processors, and one before them where the tokenizer has no text for some token."""
    if tokenizer.vocab_size >= model.vocab_size:
        return list(processors)
    return [_KnownTokens(tokenizer.vocab_size), *processors]

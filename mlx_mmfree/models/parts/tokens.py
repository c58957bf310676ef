"""Checks token ids before they reach a model: an embedding reads out of bounds without a word."""

from collections.abc import Sequence
from operator import index
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...layers.embedding import embed_tokens


def check_tokens(ids: Sequence[Any], vocab_size: int) -> None:
    """Refuses ids that have no row in the embedding; runs on the host, without an array.

    Raises:
        ValueError: An id is no whole number within `[0, vocab_size)`.
    """
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise ValueError(
                f"[tokens] ids must be whole numbers but got {token!r:.100} at position {position}."
            )
        if not 0 <= index(token) < vocab_size:
            raise ValueError(
                f"[tokens] ids must lie within the model's vocabulary, 0 to {vocab_size - 1}, but "
                f"got {token} at position {position}. Leave this token out, or use the tokenizer that "
                "belongs to the model."
            )


def check_length(count: int, most: int | None) -> None:
    """Refuses a text with more tokens than a model was made for, if it was made for so many.

    Raises:
        ValueError: There are more.
    """
    if most is not None and count > most:
        raise ValueError(
            f"[tokens] a text must have at most {most} tokens, as many as the model was made for, but "
            f"got {count}. Shorten it."
        )


def token_array(ids: Sequence[Any], vocab_size: int) -> mx.array:
    """The checked ids as `int32` of shape `(1, L)`, one sequence.

    Raises:
        ValueError: There is no id, or one is outside the vocabulary.
    """
    if not len(ids):
        raise ValueError("[tokens] at least one id must be given but got none.")
    check_tokens(ids, vocab_size)
    return mx.array([index(token) for token in ids], mx.int32)[None]


def known_rows(embedding: nn.Module, tokens: mx.array) -> mx.array:
    """The embedding's rows of `tokens`; NaN for those that it has no row for.

    An array may not be computed yet, and to look into it would wait for it. So a token outside the
    vocabulary is no error here, but neither is it read out of bounds: what follows from it is NaN.

    Args:
        embedding: Rows `(V, D)`.
        tokens: Integers `(B, L)`.

    Returns:
        `(B, L, D)`.

    Raises:
        TypeError: The tokens are no integers.
        ValueError: They have another number of axes.
    """
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise TypeError(f"[Decoder] 'tokens' must be integers but got {tokens.dtype}.")
    if tokens.ndim != 2:
        way_out = " Add a batch axis: tokens[None]." if tokens.ndim == 1 else ""
        raise ValueError(
            "[Decoder] 'tokens' must have the two axes (batch, length) but got shape "
            f"{tokens.shape}.{way_out}"
        )
    is_known = mx.logical_and(tokens >= 0, tokens < embedding.weight.shape[0])
    rows = embed_tokens(embedding, mx.where(is_known, tokens, mx.zeros_like(tokens)))
    return mx.where(is_known[..., None], rows, mx.array(mx.nan, rows.dtype))

"""Ids of tokens are checked before a model reads them."""

from collections.abc import Sequence
from operator import index
from typing import Any, cast

import mlx.core as mx

from ...layers.arguments import check_array


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


def ids_array(tokens: mx.array | Sequence[Sequence[int]], vocab_size: int) -> mx.array:
    """Ids as an array; ids of lists are checked, which waits for no device.

    Raises:
        TypeError: They are neither lists nor an array.
        ValueError: The lists are not of one length, or hold what is no id.
    """
    if not isinstance(tokens, (list, tuple)):
        check_array("Decoder", tokens, "tokens")
        return cast(mx.array, tokens)
    rows = [list(row) if isinstance(row, (list, tuple)) else None for row in tokens]
    if not rows or None in rows or len({len(row or ()) for row in rows}) > 1:
        raise ValueError(
            "[Decoder] 'tokens' must be lists of ids of one length, one for each text, as [[1, 2]], but "
            f"got {tokens!r:.80}. Pad shorter ones, and tell what is padding by 'valid'."
        )
    for row in rows:
        check_tokens(row or (), vocab_size)
    return mx.array(rows, mx.int32)


def check_length(count: int, most: int | None, words: str = "") -> None:
    """Refuses a text with more tokens than a model was made for, if it was made for so many.

    Args:
        count: The tokens.
        most: The most of them; `None` for any number.
        words: What comes before the number of tokens in the message.

    Raises:
        ValueError: There are more.
    """
    if most is not None and count > most:
        raise ValueError(
            f"[tokens] a text must have at most {most} tokens, as many as the model was made for, but "
            f"got {words}{count}. Shorten it."
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

"""Token ids on their way into an array: checked on the host, since no gather checks its indices."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def check_tokens(ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """The ids as a NumPy vector.

    Args:
        ids: Token ids, possibly none.
        vocab_size: Every id is below it.

    Raises:
        ValueError: An id is no whole number of the vocabulary; the message names it.
    """
    found = np.asarray(ids)
    if found.size == 0:
        return np.zeros(0, np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"[tokens] 'ids' must be a list of whole numbers from 0 to {vocab_size - 1} but got "
            f"{found.dtype} values of shape {found.shape}."
        )
    wrong = (found < 0) | (found >= vocab_size)
    if wrong.any():
        position = int(wrong.argmax())
        raise ValueError(
            f"[tokens] 'ids' must be from 0 to {vocab_size - 1} but got {found[position]} at "
            f"position {position}. Is this the tokenizer of the model?"
        )
    return found.astype(np.int32)


def token_array(ids: Sequence[int], vocab_size: int) -> mx.array:
    """The ids as an `int32` array `(L,)`, checked as by `check_tokens`.

    Example:
        >>> token_array([3, 1, 2], vocab_size=4)
        array([3, 1, 2], dtype=int32)
    """
    return mx.array(check_tokens(ids, vocab_size))


def left_padded(
    rows: Sequence[Sequence[int]], vocab_size: int
) -> tuple[mx.array, mx.array | None]:
    """Several sequences as one batch, the shorter ones padded on the left.

    Args:
        rows: The ids of each sequence, checked as by `check_tokens`.
        vocab_size: Every id is below it.

    Returns:
        Tokens, `int32` `(B, L)`, and booleans `(B, L)` that are `False` where padded; `None` where
        all are equally long.
    """
    checked = [check_tokens(row, vocab_size) for row in rows]
    length = max(map(len, checked))
    tokens = mx.array(np.stack([np.pad(row, (length - len(row), 0)) for row in checked]))
    padding = np.array([[length - len(row)] for row in checked])
    return tokens, mx.array(np.arange(length) >= padding) if padding.any() else None

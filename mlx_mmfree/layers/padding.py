"""Padding behind the tokens of each row, where a causal mask hides it."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import mlx.core as mx

from .context import Context

Carried = TypeVar("Carried")


class RealTokens(NamedTuple):
    """The tokens of a call that are no padding, at the front of their rows.

    Attributes:
        counts: How many there are in each row, `(B,)`; `None`: every position is one.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row.
    """

    counts: mx.array | None
    starts: mx.array | None

    @classmethod
    def all_of(cls, context: Context) -> "RealTokens":
        """Those of rows without padding."""
        return cls(None, context.starts)

    def part(self, start: int, stop: int) -> "RealTokens":
        """Those of a part of the rows."""
        counts, starts = self
        return RealTokens(
            None if counts is None else mx.clip(counts - start, 0, stop - start),
            None if starts is None else starts[:, start:stop],
        )


def padding_last(context: Context, valid: mx.array) -> tuple[mx.array, mx.array, RealTokens]:
    """How padding gets behind the tokens, the same for all layers of a call.

    Args:
        context: The call.
        valid: Its booleans `(B, L)`, `False` where padded.

    Returns:
        The order of the positions with padding last, the way back, both `(B, L)`, and the tokens.
    """
    return context.once("padding last", lambda: _padding_last(context, valid))


def _padding_last(context: Context, valid: mx.array) -> tuple[mx.array, mx.array, RealTokens]:
    batch, length = valid.shape
    order = mx.argsort(mx.where(valid, 0, length) + mx.arange(length), axis=1)
    # over empty rows MLX's sum may never end on a CPU
    counts = valid.sum(axis=1) if length else mx.zeros((batch,), mx.int32)
    starts = context.starts
    if starts is not None:
        starts = mx.take_along_axis(starts, order, axis=1)
    return order, mx.argsort(order, axis=1), RealTokens(counts, starts)


def read_without_padding(
    x: mx.array,
    context: Context,
    read: Callable[[mx.array, RealTokens], tuple[mx.array, Carried]],
) -> tuple[mx.array, Carried]:
    """What `read` makes of rows whose padding stands behind their tokens.

    Args:
        x: `(B, L, D)`, padded anywhere.
        context: The call.
        read: Called with `x`, zero where padded, and the tokens; gives `(B, L, V)` and what is carried.

    Returns:
        `(B, L, V)` in the order of `x`, zero where padded, and what is carried.
    """
    valid = context.valid
    if valid is None:
        return read(x, RealTokens.all_of(context))
    order, back, tokens = padding_last(context, valid)
    x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
    y, carried = read(mx.take_along_axis(x, order[..., None], axis=1), tokens)
    y = mx.take_along_axis(y, back[..., None], axis=1)
    return mx.where(valid[..., None], y, mx.zeros((), y.dtype)), carried

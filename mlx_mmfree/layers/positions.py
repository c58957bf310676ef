"""Positions of tokens in their rows and in their samples, of which a row may hold several."""

import mlx.core as mx

from .context import Context


def count_on(count: mx.array, length: int, context: Context) -> tuple[mx.array, mx.array]:
    """The position of each token in its sample, and how many tokens the last sample has.

    Args:
        count: Tokens of each row that were read before, integers `(B,)`.
        length: Positions of the call.
        context: The call. Padding counts for nothing, and has any position.

    Returns:
        Integers `(B, L)` from 0, and the count after the call, `(B,)`.
    """
    if not length:
        return mx.zeros((count.shape[0], 0), count.dtype), count
    if context.valid is None:
        seen = mx.broadcast_to(mx.arange(1, length + 1), (count.shape[0], length))
    else:
        seen = mx.cumsum(context.valid.astype(count.dtype), axis=1)
    seen = seen + count[:, None]
    if context.starts is not None:
        seen = seen - mx.cummax(mx.where(context.starts, seen - 1, 0), axis=1)
    return mx.maximum(seen - 1, 0), seen[:, -1]


def sample_begins(starts: mx.array, before: int | mx.array = 0) -> mx.array:
    """Where in its row the sample of each position begins.

    Args:
        starts: Booleans `(B, L)`, `True` at the first position of a sample.
        before: Number of positions of the row that were read before, a number or `(B,)`. What no
            start precedes belongs to a sample that began at 0.

    Returns:
        Integers `(B, L)`, counted from the first position of the row.
    """
    if isinstance(before, mx.array):
        before = before[:, None]
    place = mx.arange(starts.shape[1]) + before
    return mx.cummax(mx.where(starts, place, 0), axis=1)

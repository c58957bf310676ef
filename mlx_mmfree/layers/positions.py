"""Positions of the tokens of a call, counted on from a state."""

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

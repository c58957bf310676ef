"""Rows that hold several samples, one behind the other."""

import mlx.core as mx


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

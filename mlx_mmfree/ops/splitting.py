"""Cuts an array into many parts, so that their gradient takes the memory of the array."""

from collections.abc import Sequence

import mlx.core as mx

_FEW = 8
"""Of so many parts, MLX joins the gradients in one array. Those of more are arrays of that size each."""


def split_many(x: mx.array, cuts: Sequence[int], axis: int) -> list[mx.array]:
    """Like `mx.split(x, cuts, axis)`, for any number of parts.

    Args:
        x: The array.
        cuts: Where all parts but the first begin, ascending.
        axis: The axis that is cut.
    """
    if len(cuts) < _FEW:
        return list(mx.split(x, list(cuts), axis=axis)) if cuts else [x]
    size = -(-(len(cuts) + 1) // _FEW)
    bounds = range(size - 1, len(cuts), size)
    found: list[mx.array] = []
    groups = mx.split(x, [cuts[n] for n in bounds], axis=axis)
    for number, group in enumerate(groups):
        start = cuts[number * size - 1] if number else 0
        inner = cuts[number * size : (number + 1) * size - 1]
        found += split_many(group, [cut - start for cut in inner], axis)
    return found


def positions(x: mx.array, axis: int) -> list[mx.array]:
    """Each position of an axis by itself, with that axis of size 1."""
    return split_many(x, range(1, x.shape[axis]), axis) if x.shape[axis] else []

"""States as they are stored: without spare room, and checked to follow a number of tokens."""

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from ..models import Decoder
from .key_values import blank_state, counted


def trimmed_state(model: Decoder, state: Any, count: int) -> tuple[Any, ...] | None:
    """The state of one row without the room behind its tokens.

    Args:
        model: The model that made it.
        state: In the ordinary form.
        count: How many tokens the model has read.

    Returns:
        The state, or `None` if it is not one that the model has after so many tokens of one row, read
        without padding.
    """
    blank = blank_state(model, 1, count)
    found, expected = arrays_by_place(state), arrays_by_place(blank)
    if found.keys() != expected.keys() or not all(
        _holds(found[place], array) for place, array in expected.items()
    ):
        return None
    trimmed = tree_map(lambda array, want: array[_slices(want)], state, blank)
    pairs = zip(counted(model, trimmed), counted(model, blank), strict=True)
    same = [mx.array_equal(array, want) for array, want in pairs]
    return trimmed if not same or mx.stack(same).all().item() else None


def arrays_by_place(tree: Any) -> dict[str, mx.array]:
    """Every array by its place in the tree."""
    return cast(dict[str, mx.array], dict(tree_flatten(tree)))


def _holds(array: mx.array, want: mx.array) -> bool:
    """Whether an array has one row, of the dtype and at least the size that are wanted."""
    return (
        array.dtype == want.dtype
        and array.ndim == want.ndim
        and array.shape[:1] == want.shape[:1]
        and all(have >= need for have, need in zip(array.shape, want.shape, strict=True))
    )


def _slices(want: mx.array) -> tuple[slice, ...]:
    return tuple(slice(size) for size in want.shape)

"""States as bytes, which no decoding can write to and any thread may read.

A state is many small arrays, and a GPU's memory is handed out in pages of 16 KB: as one piece it takes
what it holds.
"""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ...models import Decoder
from ..key_values import blank_state, is_of_batch
from ..trimmed_state import arrays_by_place, trimmed_state


def pack(model: Decoder, state: Any, count: int) -> bytes | None:
    """The arrays of a state, one behind the other.

    Args:
        model: The model that made it.
        state: In the ordinary form.
        count: How many tokens it has read.

    Returns:
        The bytes; `None` if they are worth nothing: a number is NaN or infinite, or longer rows beside
        this one have made it what it would not be alone.

    Raises:
        ValueError: The state is not one that the model has after so many tokens of one row.
    """
    if is_of_batch(model, state, count):
        return None
    trimmed = trimmed_state(model, state, count)
    if trimmed is None:
        raise ValueError(
            f"[Sessions] 'state' must be the state that the model has after its {count} tokens, as one "
            "row without padding, but is another."
        )
    return _joined(trimmed)


def can_be_packed(model: Decoder, data: bytes, count: int) -> bool:
    """Whether `pack` can give these bytes: their numbers are finite, and the positions right."""
    trimmed = trimmed_state(model, unpack(model, data, count), count)
    return trimmed is not None and _joined(trimmed) == data


def _joined(state: tuple[Any, ...]) -> bytes | None:
    arrays = list(arrays_by_place(state).values())
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
    finite = mx.stack([mx.array(True), *(mx.all(mx.abs(array) < mx.inf) for array in floats)]).all()
    pieces = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays]
    mx.eval(finite, pieces)
    return b"".join(np.asarray(piece).data for piece in pieces) if finite.item() else None


def unpack(model: Decoder, data: bytes, count: int) -> tuple[Any, ...]:
    """The state that `pack` was given, in memory of its own."""
    position = 0

    def taken(want: mx.array) -> mx.array:
        nonlocal position
        words = np.frombuffer(data, f"u{want.dtype.size}", want.size, position)
        position += want.nbytes
        array = mx.array(words.reshape(want.shape))
        return array != 0 if want.dtype == mx.bool_ else array.view(want.dtype)

    state: tuple[Any, ...] = tree_map(taken, blank_state(model, 1, count))
    return state

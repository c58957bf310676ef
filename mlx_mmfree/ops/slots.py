"""The rule by which slots of key and value buffers hold tokens.

Slot `j` of a row holds its token `j`. With a window of W slots behind S sinks, slot `S + j` holds the
latest token `S + p` with `p % W == j`.
"""

from typing import NamedTuple

import mlx.core as mx


class Place(NamedTuple):
    """Where one more token goes in buffers that hold these positions.

    Attributes:
        lengths: The number of tokens before it in each row, int32 `(B,)`.
        slots: Its slot, as `new_slots` returns it.
        positions: The position that each slot in use holds afterwards, int32 `(B, N)`, -1 for none.
        mask: Which slots it sees, booleans `(B, 1, 1, N)`.
    """

    lengths: mx.array
    slots: mx.array
    positions: mx.array
    mask: mx.array


def next_place(positions: mx.array, room: int, window: int | None = None, sinks: int = 0) -> Place:
    """Finds the place of the next token.

    Args:
        positions: The position that each slot in use holds, int32 `(B, N)`, -1 for none.
        room: The number of slots. A token for which there is none takes the last.
        window: The number of slots behind the sinks, of which the oldest is overwritten, or `None` if
            all tokens stay.
        sinks: The number of first tokens that stay.
    """
    batch, used = positions.shape
    lengths = mx.max(positions, axis=1) + 1 if used else mx.zeros((batch,), mx.int32)
    count = min(slots_after(used, 1, window, sinks), room)
    held = held_positions(lengths + 1, count, window, sinks)
    # MLX writes behind the end of a buffer without a word
    slots = mx.minimum(new_slots(lengths, 1, window, sinks), room - 1)
    return Place(lengths, slots, held, (held >= 0)[:, None, None])


def slots_after(used: int, length: int, window: int | None, sinks: int) -> int:
    """The number of slots in use once `length` tokens follow those of `used` slots."""
    return used + length if window is None else min(used + length, sinks + window)


def new_slots(
    lengths: int | mx.array, length: int, window: int | None = None, sinks: int = 0
) -> mx.array:
    """The slots of the next `length` tokens in rows of these lengths.

    Args:
        lengths: One number for all rows, or int32 `(B,)`.
        length: The number of tokens, which take slots one behind the other.
        window: The number of slots behind the sinks, or `None` if all tokens stay.
        sinks: The number of first tokens that stay.

    Returns:
        The first slot, int32 `(1,)`, if it is the same for all rows. Otherwise all, `(B, length)`.
    """
    first = mx.array([lengths], mx.int32) if isinstance(lengths, int) else lengths
    if window is not None:
        first = mx.where(first < sinks, first, sinks + (first - sinks) % window)
    return first if first.size == 1 else first[:, None] + mx.arange(length)


def held_positions(lengths: mx.array, slots: int, window: int | None, sinks: int) -> mx.array:
    """The position that each slot holds in rows of these lengths, `(B, slots)`, or -1 for none."""
    slot, last = mx.arange(slots), lengths[:, None] - 1
    position = slot
    if window is not None:
        # the latest position that falls on the slot
        position = mx.where(slot < sinks, slot, last - (last - slot) % window)
    # not `&`, which MLX maps wrongly
    is_held = mx.logical_and(position >= slot, position <= last)
    return mx.where(is_held, position, -1)


def write_slots(buffer: mx.array, new: mx.array, slots: mx.array) -> mx.array:
    """The buffer with `new` written along axis 2 to the slots that `new_slots` returns."""
    if slots.size == 1:
        return mx.slice_update(buffer, new, slots.reshape(1), axes=(2,))
    index = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, index, new, axis=2)

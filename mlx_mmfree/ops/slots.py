"""Which slot of a key or value buffer holds which token.

Slot `j` of a row holds its token `j`. With a window of W slots behind S sinks, slot `S + j` holds the
latest token `S + p` with `p % W == j`.
"""

import mlx.core as mx


def slots_after(used: int, length: int, window: int | None, sinks: int) -> int:
    """The number of slots in use once `length` tokens follow those of `used` slots."""
    return used + length if window is None else min(used + length, sinks + window)


def next_slots(lengths: mx.array, window: int | None, sinks: int) -> mx.array:
    """The slot of the next token in rows of these lengths."""
    if window is None:
        return lengths
    return mx.where(lengths < sinks, lengths, sinks + (lengths - sinks) % window)


def held_positions(lengths: mx.array, slots: int, window: int | None, sinks: int) -> mx.array:
    """The position that each slot holds in rows of these lengths, `(B, slots)`; -1 for none."""
    slot, last = mx.arange(slots), lengths[:, None] - 1
    position = slot
    if window is not None:
        # the latest position that falls on the slot
        position = mx.where(slot < sinks, slot, last - (last - slot) % window)
    # not `&`, which MLX maps wrongly
    is_held = mx.logical_and(position >= slot, position <= last)
    return mx.where(is_held, position, -1)


def write_slots(buffer: mx.array, new: mx.array, first: int | mx.array) -> mx.array:
    """The buffer with `new` written along axis 2 from `first`, which each row has its own of."""
    if isinstance(first, int):
        first = mx.array([first], mx.int32)
    if first.size == 1:
        return mx.slice_update(buffer, new, first.reshape(1), axes=(2,))
    slots = first[:, None] + mx.arange(new.shape[2])
    slots = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, slots, new, axis=2)

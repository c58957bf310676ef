"""The keys and values that attention carries, in buffers that grow in steps or rotate."""

from typing import NamedTuple

import mlx.core as mx

GROWTH_STEP = 256
"""Slots are added by this many at a time."""


class KeyValueState(NamedTuple):
    """Keys and values of the tokens read so far.

    Slot `j` of a row holds its token `j`. With a window of W slots behind S sinks, slot `S + j` holds
    the latest token `S + p` with `p % W == j`. Rows may have read different numbers of tokens.

    Attributes:
        keys: Rotated keys `(B, G, C, K)` with room for `C` tokens.
        values: Values `(B, G, C, V)`.
        positions: For each slot in use, `(B, N)` with `N <= C`, the position of its token in the
            row's text; -1 where the row is shorter.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array

    @classmethod
    def empty(
        cls, batch_size: int, num_heads: int, key_dims: int, value_dims: int, dtype: mx.Dtype
    ) -> "KeyValueState":
        """The state before the first token; it has no slots yet."""
        return cls(
            mx.zeros((batch_size, num_heads, 0, key_dims), dtype),
            mx.zeros((batch_size, num_heads, 0, value_dims), dtype),
            mx.zeros((batch_size, 0), mx.int32),
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing was read, which the shapes tell."""
        return self.positions.shape[1] == 0

    @property
    def lengths(self) -> mx.array:
        """Number of tokens that each row has read, `(B,)`."""
        return mx.max(self.positions, axis=1) + 1


class Attended(NamedTuple):
    """What the queries of a call attend to.

    Attributes:
        keys: `(B, G, N, K)`.
        values: `(B, G, N, V)`.
        positions: The position of each, `(B, N)`, -1 where there is none; `None` if they are the
            call's own tokens alone.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array | None


def extend(
    state: KeyValueState,
    keys: mx.array,
    values: mx.array,
    counts: mx.array | None,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[Attended, KeyValueState]:
    """Adds the tokens of a call to a state.

    Args:
        state: The state before; it is not changed.
        keys: Rotated keys `(B, G, L, K)`.
        values: Values `(B, G, L, V)`.
        counts: How many tokens of each row are real, `(B,)`; they come first. `None`: all.
        window: Number of slots after which the oldest tokens are overwritten.
        sinks: Number of first tokens that are never overwritten, beside the window.
    """
    length, used = keys.shape[2], state.positions.shape[1]
    start: int | mx.array = 0 if state.is_empty else state.lengths
    end = mx.broadcast_to(start + (length if counts is None else counts), (keys.shape[0],))
    end = end.astype(mx.int32)
    slots = used + length
    if window is not None and slots > sinks + window:
        if length > 1 or counts is not None:
            return _rotate_many(state, keys, values, end, window, sinks)
        slots = sinks + window
    state = _with_room(state, slots, None if window is None else sinks + window)
    first = start
    if window is not None and not state.is_empty:
        first = mx.where(start < sinks, start, sinks + (start - sinks) % window)
    state = KeyValueState(
        _write(state.keys, keys, first),
        _write(state.values, values, first),
        _positions(end, slots, window, sinks),
    )
    if used == 0:
        return Attended(keys, values, None), state
    attended = Attended(state.keys[:, :, :slots], state.values[:, :, :slots], state.positions)
    return attended, state


def _positions(lengths: mx.array, slots: int, window: int | None, sinks: int) -> mx.array:
    """The position that each slot holds in rows of these lengths."""
    slot, last = mx.arange(slots), lengths[:, None] - 1
    position = slot
    if window is not None:
        # the latest position that falls on the slot
        position = mx.where(slot < sinks, slot, last - (last - slot) % window)
    return mx.where((position >= slot) & (position <= last), position, -1)


def _with_room(state: KeyValueState, slots: int, most: int | None) -> KeyValueState:
    room = state.keys.shape[2]
    if slots <= room:
        return state
    grown = -(-slots // GROWTH_STEP) * GROWTH_STEP
    grown = grown if most is None else min(grown, most)
    padding = [(0, 0), (0, 0), (0, grown - room), (0, 0)]
    return state._replace(keys=mx.pad(state.keys, padding), values=mx.pad(state.values, padding))


def _write(buffer: mx.array, new: mx.array, first: int | mx.array) -> mx.array:
    """The buffer with `new` written along axis 2 from `first`, which each row has its own of."""
    new = new.astype(buffer.dtype)
    if isinstance(first, int):
        first = mx.array([first], mx.int32)
    if first.size == 1:
        return mx.slice_update(buffer, new, first.reshape(1), axes=(2,))
    slots = first[:, None] + mx.arange(new.shape[2])
    slots = mx.broadcast_to(slots[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, slots, new, axis=2)


def _rotate_many(
    state: KeyValueState,
    keys: mx.array,
    values: mx.array,
    end: mx.array,
    window: int,
    sinks: int,
) -> tuple[Attended, KeyValueState]:
    """Several tokens for a full window: they see the old ones that they then overwrite."""
    used, length = state.positions.shape[1], keys.shape[2]
    start = mx.zeros_like(end) if state.is_empty else state.lengths
    new_positions = start[:, None] + mx.arange(length)
    new_positions = mx.where(new_positions < end[:, None], new_positions, -1)
    attended = Attended(
        mx.concatenate([state.keys[:, :, :used], keys.astype(state.keys.dtype)], axis=2),
        mx.concatenate([state.values[:, :, :used], values.astype(state.values.dtype)], axis=2),
        None if state.is_empty else mx.concatenate([state.positions, new_positions], axis=1),
    )
    slots = sinks + window
    positions = _positions(end, slots, window, sinks)
    is_new = positions >= start[:, None]
    source = mx.where(is_new, used + positions - start[:, None], mx.arange(slots))
    source = source[:, None, :, None]
    keys, values = (mx.take_along_axis(x, source, axis=2) for x in attended[:2])
    return attended, KeyValueState(keys, values, positions)

"""The keys and values that attention carries, in buffers that grow in steps or rotate."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..ops.slots import held_positions, next_slots, slots_after, write_slots
from .quantized_array import Quantization, QuantizedArray

Buffer = mx.array | QuantizedArray
"""Vectors in slots `(B, G, C, K)`; quantised, each of the three arrays has its slots on axis 2."""

GROWTH_STEP = 256
"""Slots are added by this many at a time."""


class KeyValueState(NamedTuple):
    """Keys and values of the tokens read so far.

    Slot `j` of a row holds its token `j`. With a window of W slots behind S sinks, slot `S + j` holds
    the latest token `S + p` with `p % W == j`. Rows may have read different numbers of tokens.

    Attributes:
        keys: Rotated keys `(B, G, C, K)` with room for `C` tokens, or their quantised form.
        values: Values `(B, G, C, V)`, or their quantised form.
        positions: For each slot in use, `(B, N)` with `N <= C`, the position of its token in the
            row's text; -1 where the row is shorter.
    """

    keys: Buffer
    values: Buffer
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

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.keys, QuantizedArray)

    def quantized(self, quantization: Quantization) -> "KeyValueState":
        """The same tokens with keys and values in few bits."""
        if isinstance(self.keys, QuantizedArray) or isinstance(self.values, QuantizedArray):
            return self
        return self._replace(
            keys=QuantizedArray.encode(self.keys, quantization),
            values=QuantizedArray.encode(self.values, quantization),
        )

    def without_last(self, count: int) -> "KeyValueState":
        """The state before the last `count` tokens of every row; not once slots have rotated."""
        return self._replace(positions=self.positions[:, : self.positions.shape[1] - count])

    def blank(self, length: int, window: int | None = None, sinks: int = 0) -> "KeyValueState":
        """What this empty state becomes after `length` tokens, without room, keys and values zero."""
        slots = slots_after(0, length, window, sinks)
        padding = [(0, 0), (0, 0), (0, slots), (0, 0)]
        ends = mx.full((self.positions.shape[0],), length, mx.int32)
        return KeyValueState(
            _each(lambda buffer: mx.pad(buffer, padding), self.keys),
            _each(lambda buffer: mx.pad(buffer, padding), self.values),
            held_positions(ends, slots, window, sinks),
        )


class FixedKeyValueState(NamedTuple):
    """A `KeyValueState` whose shapes stay while it has free slots.

    Attributes:
        keys: Rotated keys `(B, G, C, K)`.
        values: Values `(B, G, C, V)`.
        positions: For each slot the position of its token, `(B, C)`; -1 where it is free.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array

    @classmethod
    def of(cls, state: KeyValueState) -> "FixedKeyValueState":
        """The same tokens; `state` is not quantised."""
        keys, values = cast(tuple[mx.array, mx.array], state[:2])
        free = keys.shape[2] - state.positions.shape[1]
        return cls(keys, values, mx.pad(state.positions, [(0, 0), (0, free)], constant_values=-1))


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
    begin: mx.array | None = None,
) -> tuple[Attended, KeyValueState]:
    """Adds the tokens of a call to a state.

    Args:
        state: The state before; it is not changed.
        keys: Rotated keys `(B, G, L, K)`.
        values: Values `(B, G, L, V)`.
        counts: How many tokens of each row are real, `(B,)`; they come first. `None`: all.
        window: Number of slots after which the oldest tokens are overwritten.
        sinks: Number of first tokens that are never overwritten, beside the window.
        begin: Where in each row, `(B,)`, the text begins that the new state goes on with; the call
            still sees all. `None`: at 0.
    """
    length, used = keys.shape[2], state.positions.shape[1]
    key_dims, value_dims = keys.shape[-1], values.shape[-1]
    new_keys, new_values = _stored(keys, state.keys), _stored(values, state.values)
    start: int | mx.array = 0 if state.is_empty else state.lengths
    end = mx.broadcast_to(start + (length if counts is None else counts), (keys.shape[0],))
    end = end.astype(mx.int32)
    slots = slots_after(used, length, window, sinks)
    is_full = slots < used + length
    if begin is not None or (is_full and (length > 1 or counts is not None)):
        positions = held_positions(end if begin is None else end - begin, slots, window, sinks)
        places = positions if begin is None else positions + begin[:, None]
        seen, visible, state = _rewritten(state, new_keys, new_values, end, positions, places)
        return Attended(_read(seen[0], key_dims), _read(seen[1], value_dims), visible), state
    state = with_room(state, length, window, sinks)
    first = next_slots(start, window, sinks) if isinstance(start, mx.array) else start
    state = KeyValueState(
        _each(lambda buffer, new: write_slots(buffer, new, first), state.keys, new_keys),
        _each(lambda buffer, new: write_slots(buffer, new, first), state.values, new_values),
        held_positions(end, slots, window, sinks),
    )
    if used == 0:
        return Attended(_read(new_keys, key_dims), _read(new_values, value_dims), None), state
    in_use = _each(lambda buffer: buffer[:, :, :slots], (state.keys, state.values))
    attended = (_read(in_use[0], key_dims), _read(in_use[1], value_dims))
    return Attended(*attended, state.positions), state


def with_room(
    state: KeyValueState, length: int, window: int | None = None, sinks: int = 0
) -> KeyValueState:
    """The state with room for `length` more tokens."""
    room, slots = _length(state.keys), slots_after(state.positions.shape[1], length, window, sinks)
    if slots <= room:
        return state
    grown = -(-slots // GROWTH_STEP) * GROWTH_STEP
    grown = grown if window is None else min(grown, sinks + window)
    padding = [(0, 0), (0, 0), (0, grown - room), (0, 0)]
    keys, values = _each(lambda buffer: mx.pad(buffer, padding), (state.keys, state.values))
    return state._replace(keys=keys, values=values)


def _each(function: Callable[..., mx.array], *buffers: Any) -> Any:
    """The function of each array of one or several buffers."""
    return tree_map(function, *buffers)


def _stored(x: mx.array, buffer: Buffer) -> Buffer:
    """Vectors in the form of the buffer."""
    if isinstance(buffer, QuantizedArray):
        x = x.astype(buffer.scales.dtype)
        return QuantizedArray.encode(x, buffer.quantization(x.shape[-1]))
    return x.astype(buffer.dtype)


def _read(buffer: Buffer, dims: int) -> mx.array:
    return buffer.decode(dims) if isinstance(buffer, QuantizedArray) else buffer


def _rewritten(
    state: KeyValueState,
    keys: Buffer,
    values: Buffer,
    end: mx.array,
    positions: mx.array,
    places: mx.array,
) -> tuple[tuple[Buffer, Buffer], mx.array | None, KeyValueState]:
    """Several tokens, which see the old ones, into slots filled anew.

    The slots then hold the tokens of these `positions`, found at these `places` of their rows.
    """
    used, length = state.positions.shape[1], _length(keys)
    start = mx.zeros_like(end) if state.is_empty else state.lengths
    new_positions = start[:, None] + mx.arange(length)
    new_positions = mx.where(new_positions < end[:, None], new_positions, -1)
    seen = _each(
        lambda old, new: mx.concatenate([old[:, :, :used], new], axis=2),
        (state.keys, state.values),
        (keys, values),
    )
    seen_positions = None
    if not state.is_empty:
        seen_positions = mx.concatenate([state.positions, new_positions], axis=1)
    is_new = places >= start[:, None]
    source = mx.where(is_new, used + places - start[:, None], mx.arange(places.shape[1]))
    source = source[:, None, :, None]
    keys, values = _each(lambda buffer: mx.take_along_axis(buffer, source, axis=2), seen)
    return seen, seen_positions, KeyValueState(keys, values, positions)


def _length(buffer: Buffer) -> int:
    """The number of slots."""
    array = buffer.codes if isinstance(buffer, QuantizedArray) else buffer
    return array.shape[2]

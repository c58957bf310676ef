"""The keys and values that attention carries, in buffers that grow in steps or rotate."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_map

from ..ops.slots import held_positions, slots_after
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
    def used(self) -> int:
        """Number of slots in use."""
        return self.positions.shape[1]

    @property
    def room(self) -> int:
        """Number of slots."""
        return length_of(self.keys)

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

    def with_room(self, length: int, window: int | None = None, sinks: int = 0) -> "KeyValueState":
        """The state with room for `length` more tokens."""
        added = self.room_for(length, window, sinks) - self.room
        if not added:
            return self
        keys, values = padded((self.keys, self.values), added)
        return self._replace(keys=keys, values=values)

    def room_for(self, length: int, window: int | None = None, sinks: int = 0) -> int:
        """The number of slots once there is room for `length` more tokens."""
        room, slots = self.room, slots_after(self.used, length, window, sinks)
        if slots <= room:
            return room
        grown = -(-slots // GROWTH_STEP) * GROWTH_STEP
        return grown if window is None else min(grown, sinks + window)

    def without_last(self, count: int) -> "KeyValueState":
        """The state before the last `count` tokens of every row; not once slots have rotated."""
        return self._replace(positions=_before_last(self.positions, count)).without_slots(count)

    def without_slots(self, count: int) -> "KeyValueState":
        """The state in which the last `count` slots are free, since no row has a token there."""
        return self._replace(positions=self.positions[:, : self.used - count])

    @classmethod
    def joined(cls, states: Sequence["KeyValueState"]) -> "KeyValueState":
        """The rows of several states of the same sizes, one behind the other."""
        return cls(*tree_map(lambda *arrays: mx.concatenate(list(arrays)), *states))

    def widened(self, used: int, room: int) -> "KeyValueState":
        """The state with so many slots in use and so many in all, of which the new ones are empty."""
        keys, values = padded((self.keys, self.values), room - self.room)
        missing = [(0, 0), (0, used - self.used)]
        return KeyValueState(keys, values, mx.pad(self.positions, missing, constant_values=-1))

    def narrowed(self, slots: int) -> "KeyValueState":
        """The first so many slots in use, and room up to the next step; no row holds a token behind."""
        room = min(self.room, -(-slots // GROWTH_STEP) * GROWTH_STEP)
        keys, values = each(lambda buffer: buffer[:, :, :room], (self.keys, self.values))
        return KeyValueState(keys, values, self.positions[:, :slots])

    def selected(self, rows: mx.array) -> "KeyValueState":
        """Some rows, in the order given, integers `(N,)`."""
        return KeyValueState(*each(lambda array: array[rows], tuple(self)))

    def blank(self, length: int, window: int | None = None, sinks: int = 0) -> "KeyValueState":
        """What this empty state becomes after `length` tokens, without room, keys and values zero."""
        slots = slots_after(0, length, window, sinks)
        keys, values = padded((self.keys, self.values), slots)
        ends = mx.full((self.positions.shape[0],), length, mx.int32)
        return KeyValueState(keys, values, held_positions(ends, slots, window, sinks))


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
        free = state.room - state.used
        return cls(keys, values, mx.pad(state.positions, [(0, 0), (0, free)], constant_values=-1))

    def without_last(self, count: int) -> "FixedKeyValueState":
        """The state before the last `count` tokens of every row; not once slots have rotated."""
        return self._replace(positions=_before_last(self.positions, count))


def _before_last(positions: mx.array, count: int) -> mx.array:
    """The positions `(B, N)` without the last `count` of each row."""
    last = mx.max(positions, axis=1, keepdims=True) - count
    return mx.where(positions > last, -1, positions)


def each(function: Callable[..., mx.array], *buffers: Any) -> Any:
    """The function of each array of one or several buffers."""
    return tree_map(function, *buffers)


def length_of(buffer: Buffer) -> int:
    """The number of slots."""
    array = buffer.codes if isinstance(buffer, QuantizedArray) else buffer
    return array.shape[2]


def padded(buffers: tuple[Buffer, Buffer], count: int) -> Any:
    """The buffers with so many more slots, of zeros."""
    padding = [(0, 0), (0, 0), (0, count), (0, 0)]
    return each(lambda buffer: mx.pad(buffer, padding), buffers)

"""The keys and values that attention holds, and which of them a token sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.utils import tree_map

from ...ops import attention_tail
from ...ops.attention import Mask
from ...ops.attention_step import new_slots, slot_positions, slots_after, write_slots
from ..context import sample_begins
from ..mixer import StateKind
from ..quantization import Quantization, QuantizedArray
from .options import KeyValueCache

Buffer = mx.array | QuantizedArray
"""Vectors in slots `(B, G, C, K)`; quantised, each of the three arrays has its slots on axis 2."""

GROWTH_STEP = 256
"""Slots are added by this many at a time."""


class KeyValueState(NamedTuple):
    """Keys and values of the tokens read so far.

    Slot `j` of a row holds its token `j`. With a window of W slots after S sinks, slot `S + j` holds
    the latest token `S + p` with `p % W == j`. Rows may have read different numbers of tokens.

    Attributes:
        keys: Rotated keys `(B, G, C, K)` with capacity for `C` tokens, or their quantised variant.
        values: Values `(B, G, C, V)`, or their quantised variant.
        positions: For each slot in use, `(B, N)` with `N <= C`, the position of its token in the
            row's text; -1 where the row is shorter.
    """

    keys: Buffer
    values: Buffer
    positions: mx.array

    @property
    def used(self) -> int:
        """Number of slots in use."""
        return self.positions.shape[1]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        keys = self.keys
        return (keys.codes if isinstance(keys, QuantizedArray) else keys).shape[2]

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

    def with_capacity(
        self, length: int, window: int | None = None, sinks: int = 0
    ) -> "KeyValueState":
        """The state with capacity for `length` more tokens."""
        capacity = self.capacity
        slots = slots_after(self.positions.shape[1], length, window, sinks)
        if slots <= capacity:
            return self
        keys, values = _grown((self.keys, self.values), capacity, slots, window, sinks)
        return self._replace(keys=keys, values=values)

    @classmethod
    def merged(cls, states: Sequence["KeyValueState"]) -> "KeyValueState":
        """The rows of several states of the same sizes, one after the other."""
        return cls(*tree_map(lambda *arrays: mx.concatenate(list(arrays)), *states))

    def widened(self, used: int, capacity: int) -> "KeyValueState":
        """The state with so many slots in use and so many in all, of which the new ones are empty."""
        free = [(0, 0), (0, 0), (0, capacity - self.capacity), (0, 0)]
        keys, values = tree_map(lambda buffer: mx.pad(buffer, free), (self.keys, self.values))
        missing = [(0, 0), (0, used - self.used)]
        return KeyValueState(keys, values, mx.pad(self.positions, missing, constant_values=-1))


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


class TailedKeyValueState(NamedTuple):
    """A `FixedKeyValueState` whose last tokens are in a tail, so that its buffers are only read.

    Attributes:
        keys: Rotated keys `(B, G, C, K)`.
        values: Values `(B, G, C, K)`.
        positions: For each slot the position of its token, `(B, C)`; -1 where it is free.
        tail: The tokens after them.
    """

    keys: mx.array
    values: mx.array
    positions: mx.array
    tail: attention_tail.Tail


FIXED = (FixedKeyValueState, TailedKeyValueState)
"""The formats whose shapes stay."""


def _grown(
    buffers: tuple[Buffer, Buffer], capacity: int, slots: int, window: int | None, sinks: int
) -> Any:
    """Buffers of so many slots with as many as are made where `slots` are needed."""
    made = -(-slots // GROWTH_STEP) * GROWTH_STEP
    made = made if window is None else min(made, sinks + window)
    free = [(0, 0), (0, 0), (0, made - capacity), (0, 0)]
    return tree_map(lambda buffer: mx.pad(buffer, free), buffers)


class Reading(NamedTuple):
    """Where the tokens of a call stand, which slots they take, and what they see.

    It depends on how many tokens the rows hold, not on what these are, so that layers share it.

    Attributes:
        offset: Positions within samples: of the first token, a number or `(B,)`, or of each, `(B, L)`.
        token_positions: The position of each token in its row, `(1, L)` or `(B, L)`.
        begins: Where in its row the sample of each token begins, `(B, L)`; `None`: at 0.
        slots: Where the tokens of the call go, as `new_slots` gives it; `None` if slots are filled anew.
        source: What each slot is filled with then, `(B, C)`: the number of a token, first the tokens in
            slots, then the tokens of the call.
        positions: The position that each slot holds afterwards, `(B, C)`, -1 for none.
        seen: The position of each key that the call sees, `(B, N)`, -1 for none; `None`: its own.
        mask: What each query sees.
    """

    offset: int | mx.array
    token_positions: mx.array
    begins: mx.array | None
    slots: mx.array | None
    source: mx.array | None
    positions: mx.array
    seen: mx.array | None
    mask: Mask


def read(
    positions: mx.array,
    length: int,
    counts: mx.array | None = None,
    starts: mx.array | None = None,
    window: int | None = None,
    sinks: int = 0,
    step: int = 1,
) -> Reading:
    """How a call is read by a state that holds these positions.

    Args:
        positions: Those of a `KeyValueState`, `(B, N)`.
        length: Number of tokens `L` of the call.
        counts: How many of each row are real, `(B,)`; they come first. `None`: all.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row. The new state goes on
            with the last one.
        window: Number of slots after which the oldest tokens are overwritten.
        sinks: Number of first tokens that are never overwritten, beside the window.
        step: Number of tokens by which the window moves on at a time.
    """
    batch, used = positions.shape
    start: int | mx.array = mx.max(positions, axis=1) + 1 if used else 0
    column = start[:, None] if isinstance(start, mx.array) else start
    token_positions = column + mx.arange(length)[None]
    begins = None if starts is None else sample_begins(starts, start)
    end = mx.broadcast_to(start + (length if counts is None else counts), (batch,))
    end = end.astype(mx.int32)
    count = slots_after(used, length, window, sinks)
    is_full = count < used + length
    seen = slots = source = None
    if begins is not None or (is_full and (length > 1 or counts is not None)):
        begin = 0 if begins is None else begins[:, -1:]
        stored = slot_positions(
            end if begins is None else end - begins[:, -1], count, window, sinks
        )
        in_row = stored + begin
        source = mx.where(in_row >= column, used + in_row - column, mx.arange(count))
        if used:
            own = mx.where(token_positions < end[:, None], token_positions, -1)
            seen = mx.concatenate([positions, own], axis=1)
    else:
        slots = new_slots(start, length, window, sinks)
        stored = slot_positions(end, count, window, sinks)
        seen = stored if used else None
    offset = start if begins is None else token_positions - begins
    reading = Reading(offset, token_positions, begins, slots, source, stored, seen, None)
    is_short = window is None or length <= sinks + window
    if seen is None and is_short and begins is None:
        return reading._replace(mask="causal") if length > 1 else reading
    mask = _mask(reading, window, sinks, step)
    return reading._replace(mask=mask if counts is None else _without_empty_rows(mask))


def _mask(reading: Reading, window: int | None, sinks: int, step: int) -> mx.array:
    """Which keys each query of a call sees, `(B, 1, L, N)`."""
    token_positions, begins, seen = reading.token_positions, reading.begins, reading.seen
    # without a state before, the keys are the call's own
    seen = mx.arange(token_positions.shape[1])[None] if seen is None else seen
    query, key = token_positions[..., None], seen[:, None]
    begin = 0 if begins is None else begins[..., None]
    mask = mx.logical_and(key >= begin, key <= query)
    if window is not None:
        is_near = query - key < window
        if step > 1:
            is_near = key - begin >= first_seen(query - begin, window, step)
        is_near = mx.logical_or(is_near, key < begin + sinks)
        mask = mx.logical_and(mask, is_near)
    return mask[:, None]


def _without_empty_rows(mask: mx.array) -> mx.array:
    """Lets padding that would see nothing see everything, since its gradient is no number otherwise."""
    return mx.logical_or(mask, mx.logical_not(mx.any(mask, axis=-1, keepdims=True)))


def first_seen(position: mx.array, window: int, step: int) -> mx.array:
    """The first position that a window shows to one, if it moves on by `step` tokens at a time."""
    return (position // step + 1) * step - window


def read_whole(
    length: int, counts: mx.array | None, starts: mx.array | None
) -> tuple[int | mx.array, Mask]:
    """How a call is read without a state, where every token sees all others of its sample.

    Args:
        length: Number of tokens `L`.
        counts: As of `read`.
        starts: As of `read`.

    Returns:
        The positions, as `Reading.offset`, and the mask.
    """
    token = mx.arange(length)
    if starts is None:
        if counts is None:
            return 0, None
        return 0, _without_empty_rows(token < counts[:, None, None, None])
    begins = sample_begins(starts)
    # padding belongs to no sample
    sample = begins if counts is None else mx.where(token < counts[:, None], begins, -1)
    return token - begins, (sample[:, :, None] == sample[:, None])[:, None]


def sink_positions(
    reading: Reading, batch: int, count: int, sinks: int, farthest: int
) -> tuple[mx.array, mx.array]:
    """Where queries stand for the sinks, and which keys are sinks.

    Args:
        reading: That of the call.
        batch: Number of rows.
        count: Number of keys `N`.
        sinks: Number of first tokens that stay.
        farthest: The position of a query after a full window, from which the sinks look as near as
            if the text between had never been.

    Returns:
        Positions `(B, L)` and booleans `(B, 1, N, 1)`.
    """
    query, length = reading.token_positions, reading.token_positions.shape[1]
    key = mx.arange(length)[None] if reading.seen is None else reading.seen
    if reading.begins is not None:
        query = query - reading.begins
        # the tokens before the call belong to a text that began at 0
        key = key - mx.pad(reading.begins, [(0, 0), (count - length, 0)])
    positions = mx.broadcast_to(mx.minimum(query, farthest), (batch, length))
    return positions, (key < sinks)[:, None, :, None]


def extend(
    state: KeyValueState,
    keys: mx.array,
    values: mx.array,
    reading: Reading,
    window: int | None = None,
    sinks: int = 0,
) -> tuple[mx.array, mx.array, KeyValueState]:
    """Adds the keys and values of a call to a state.

    Args:
        state: The state before; it is not changed.
        keys: Rotated keys `(B, G, L, K)`.
        values: Values `(B, G, L, V)`.
        reading: That of `read` with the positions of the state.
        window: As given to `read`.
        sinks: As given to `read`.

    Returns:
        The keys and the values that the call sees, `(B, G, N, K)` and `(B, G, N, V)`, and the state.
    """
    used, dims = state.positions.shape[1], (keys.shape[-1], values.shape[-1])
    if isinstance(state.keys, mx.array) and isinstance(state.values, mx.array):
        new: Any = keys.astype(state.keys.dtype), values.astype(state.values.dtype)
    else:
        buffers = cast(tuple[QuantizedArray, QuantizedArray], state[:2])
        new = tuple(map(_quantized_alike, (keys, values), buffers))
    attended, length, count = new, keys.shape[2], reading.positions.shape[1]
    if reading.source is not None:
        attended = tree_map(
            lambda old, own: mx.concatenate([old[:, :, :used], own], axis=2), state[:2], new
        )
        source = reading.source[:, None, :, None]
        stored = tree_map(lambda buffer: mx.take_along_axis(buffer, source, axis=2), attended)
    elif used == 0:
        # the first tokens take the first slots
        stored = _grown(new, length, count, window, sinks)
    else:
        state = state.with_capacity(length, window, sinks)
        slots = cast(mx.array, reading.slots)
        stored = tree_map(lambda buffer, own: write_slots(buffer, own, slots), state[:2], new)
        if used:
            attended = tree_map(lambda buffer: buffer[:, :, :count], stored)
    keys, values = (
        buffer.decode(size) if isinstance(buffer, QuantizedArray) else buffer
        for buffer, size in zip(attended, dims, strict=True)
    )
    return keys, values, KeyValueState(stored[0], stored[1], reading.positions)


def _quantized_alike(x: mx.array, buffer: QuantizedArray) -> QuantizedArray:
    """Vectors in the layout of a buffer."""
    x = x.astype(buffer.scales.dtype)
    return QuantizedArray.encode(x, buffer.quantization(x.shape[-1]))


SMALLEST = 64
"""Tokens of a block at least; smaller products would take longer for each token."""


class SequenceBlocks:
    """Blocks of one size, each beside the one before and the one after if there are several.

    Blocks become rows of a batch: where a row is cut into `n` blocks, row `b`, block `i` is row
    `b n + i`.

    Args:
        length: Number of tokens `L`.
        size: Tokens `S` of a block. The last one is filled up.
    """

    def __init__(self, length: int, size: int):
        self.length = length
        self.size = size
        self.count = -(-length // size)
        self._beside = int(self.count > 1)

    @classmethod
    def of_window(cls, length: int, window: int) -> "SequenceBlocks":
        """Those beyond whose neighbours no token sees that sees what is nearer than the window."""
        return cls(length, min(max(window, SMALLEST), length))

    @property
    def span(self) -> int:
        """Tokens `N` of a block and those beside it."""
        return (1 + 2 * self._beside) * self.size

    def own(self, x: mx.array, fill: int = 0) -> mx.array:
        """Each block of `(B, H, L, K)`, as `(B n, H, S, K)`."""
        return mx.flatten(self._cut(self._padded(x, 0, fill)).swapaxes(1, 2), 0, 1)

    def near(self, x: mx.array, fill: int = 0) -> mx.array:
        """Each block of `(B, H, L, K)` between those beside it, as `(B n, H, N, K)`."""
        x, whole = self._padded(x, self._beside, fill), self.count * self.size
        starts = range(0, self.span, self.size)
        blocks = [self._cut(x[:, :, start : start + whole]) for start in starts]
        return mx.flatten(mx.concatenate(blocks, axis=3).swapaxes(1, 2), 0, 1)

    def _padded(self, x: mx.array, more: int, fill: int) -> mx.array:
        """Filled up to whole blocks, with some blocks more before and after."""
        missing = self.count * self.size - self.length
        if not missing and not more:
            return x
        widths = [(0, 0), (0, 0), (more * self.size, missing + more * self.size), (0, 0)]
        return mx.pad(x, widths, constant_values=fill)

    def _cut(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, 2, (self.count, self.size))

    def merged(self, y: mx.array) -> mx.array:
        """`(B n, H, S, V)` as the sequence `(B, H, L, V)`."""
        blocks = mx.unflatten(y, 0, (-1, self.count)).swapaxes(1, 2)
        return mx.flatten(blocks, 2, 3)[:, :, : self.length]

    def every_row(self, x: mx.array, batch: int) -> mx.array:
        """An array made for one row, `(n, ...)`, for each of a batch, `(B n, ...)`."""
        return x if x.shape[0] != self.count or batch == 1 else mx.concatenate([x] * batch)

    def for_each(self, x: mx.array) -> mx.array:
        """An array given to every block of a row, `(B, ...)`, as `(B n, ...)`."""
        shape = (x.shape[0], self.count, *x.shape[1:])
        return mx.flatten(mx.broadcast_to(x[:, None], shape), 0, 1)

    @property
    def relative(self) -> mx.array:
        """The position of each key less the query's, `(1, S, N)`."""
        key = mx.arange(self.span) - self._beside * self.size
        return key[None, None] - mx.arange(self.size)[:, None]


def near_mask(
    blocks: SequenceBlocks,
    counts: mx.array | None,
    starts: mx.array | None,
    window: int,
    step: int,
) -> mx.array:
    """Which tokens of its block and the ones beside each token sees on both sides.

    Args:
        blocks: Those of the sequence, as large as the window at least.
        counts: How many tokens of each row are real, `(B,)`; they come first. `None`: all.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row.
        window: A token sees those nearer than this.
        step: Number of tokens by which the window moves on at a time.

    Returns:
        Booleans `(n, 1, S, N)`, or `(B n, 1, S, N)` where rows differ. Padding sees padding, so
        that no row is empty.
    """
    token = mx.arange(blocks.length)[None]
    begin = mx.zeros_like(token) if starts is None else sample_begins(starts)
    if counts is not None:
        begin = mx.where(token < counts[:, None], begin, -1)
    begin = mx.broadcast_to(begin, (begin.shape[0], blocks.length))
    position = mx.broadcast_to(token - begin, begin.shape)

    def column(x: mx.array) -> mx.array:
        return x[:, None, :, None]

    near_begin = blocks.near(column(begin), -1).swapaxes(2, 3)
    is_same = blocks.own(column(begin), -1) == near_begin
    # filled up, positions go on from the padding beside them
    query = blocks.own(column(position))
    key = query + blocks.relative
    low = first_seen(query, window, step)
    high = query // step * step + window
    is_near = mx.logical_and(key >= low, key < high)
    return mx.logical_and(is_same, is_near)


AnyKeyValueState = KeyValueState | FixedKeyValueState | TailedKeyValueState


@dataclass(frozen=True, eq=False)
class KeyValueKind(StateKind):
    """The states of one attention layer: a `KeyValueState`, or in fixed shapes a `FixedKeyValueState`.

    Attributes:
        num_heads: Key and value heads `G`.
        head_dim: Dims `K` of a key; 0 where there are only values.
        cache: Which tokens are seen, and how their keys and values are stored.
        takes_steps: Whether `attention_step` computes what this layer does with a single token.
        value_dims: Dims of a value. Default: `head_dim`.
        is_exact: A token sees the same whether it is read with later ones or alone.
    """

    num_heads: int
    head_dim: int
    cache: KeyValueCache
    takes_steps: bool
    value_dims: int | None = None
    is_exact: bool = True

    @property
    def settings(self) -> str:
        return repr(self.cache)

    def quantized(self, state: KeyValueState) -> KeyValueState:
        """The state with keys and values in few bits, if that is how they are to be stored."""
        quantization = self.cache.quantization
        return state if quantization is None else state.quantized(quantization)

    def blank(self, batch_size: int, length: int, dtype: mx.Dtype) -> KeyValueState:
        window, sinks = self.cache.window, self.cache.sinks
        value_dims = self.head_dim if self.value_dims is None else self.value_dims
        slots = slots_after(0, length, window, sinks)
        shape = batch_size, self.num_heads, slots
        keys, values = (mx.zeros((*shape, dims), dtype) for dims in (self.head_dim, value_dims))
        ends = mx.full((batch_size,), length, mx.int32)
        state = KeyValueState(keys, values, slot_positions(ends, slots, window, sinks))
        if self.cache.quantization is None:
            return state
        return self.quantized(state) if self._quantizes(length) else state

    @property
    def exact_length(self) -> int | None:
        return self.cache.exact_slots

    def is_of_batch(self, state: AnyKeyValueState, length: int) -> bool:
        """Like `StateKind.is_of_batch`: a longer row beside this one has made it quantised."""
        is_quantized = isinstance(state, KeyValueState) and state.is_quantized
        return is_quantized and not self._quantizes(length)

    def _quantizes(self, length: int) -> bool:
        """Returns whether the state after `length` tokens of one row is quantised."""
        exact = self.cache.exact_slots
        return exact is not None and (exact == 0 or length > exact)

    def counted(self, state: AnyKeyValueState) -> tuple[mx.array, ...]:
        return (state.positions,)

    def can_rewind(self, state: AnyKeyValueState, count: int) -> bool:
        capacity = self.cache.capacity
        if isinstance(state, FIXED):
            # with a window it is not known here whether the next tokens take the slots of others
            return capacity is None and self.is_exact
        if not self.is_exact or (capacity is not None and state.used + count > capacity):
            return False
        exact = self.cache.exact_slots
        return exact is None or state.is_quantized or state.used + count <= exact

    def rewound(self, state: AnyKeyValueState, count: int) -> AnyKeyValueState:
        positions = state.positions
        last = mx.max(positions, axis=1, keepdims=True) - count
        if isinstance(state, TailedKeyValueState):
            # first what the tail holds
            tail, last = state.tail, last + state.tail.used
            state = state._replace(tail=tail._replace(used=mx.maximum(tail.used - count, 0)))
        positions = mx.where(positions > last, -1, positions)
        if isinstance(state, KeyValueState):
            # no row has a token in the last slots
            positions = positions[:, : positions.shape[1] - count]
        return state._replace(positions=positions)

    def unpacked(self, state: Any, array: Callable[..., mx.array], after: int) -> KeyValueState:
        """Like `StateKind.unpacked`, with capacity for some tokens, since most texts go on."""
        slots = ((state.positions.shape[1] - after) // GROWTH_STEP + 1) * GROWTH_STEP
        if self.cache.window is not None:
            slots = min(slots, self.cache.sinks + self.cache.window)
        keys, values = tree_map(lambda each: array(each, slots), state[:2])
        return KeyValueState(keys, values, array(state.positions))

    def fixed(
        self, state: AnyKeyValueState, count: int = 1
    ) -> tuple[FixedKeyValueState, int | None] | None:
        cache = self.cache
        # what `attention_step` can read a token into
        if not isinstance(state, KeyValueState) or isinstance(state.keys, QuantizedArray):
            return None
        if cache.quantization is not None or not self.takes_steps:
            return None
        positions, used = state.positions, state.positions.shape[1]
        if used + count > state.keys.shape[2]:
            state = state.with_capacity(count, cache.window, cache.sinks)
        keys, values = cast(tuple[mx.array, mx.array], state[:2])
        capacity = keys.shape[2]
        positions = mx.pad(positions, [(0, 0), (0, capacity - used)], constant_values=-1)
        fixed = FixedKeyValueState(keys, values, positions)
        is_full = cache.window is not None and capacity == cache.sinks + cache.window
        return fixed, None if is_full else capacity - used

    def growing(self, state: FixedKeyValueState, unread: int | None) -> KeyValueState:
        keys, values, positions = state
        return KeyValueState(keys, values, positions[:, : positions.shape[1] - (unread or 0)])

    def with_tail(self, state: Any, slots: int) -> Any:
        """Like `StateKind.with_tail`, except for heads that no kernel takes, and for small windows."""
        window = self.cache.window
        is_small = window is not None and window < slots
        if is_small or not isinstance(state, FixedKeyValueState) or not self._has_kernel:
            return state
        return TailedKeyValueState(*state, attention_tail.Tail.empty(state.keys, slots))

    @property
    def _has_kernel(self) -> bool:
        """True if a GPU has a kernel that reads a tail."""
        return self.value_dims in (None, self.head_dim) and attention_tail.fits(self.head_dim)

    def without_tail(self, state: Any, count: int) -> Any:
        if not isinstance(state, TailedKeyValueState):
            return state
        window, sinks = self.cache.window, self.cache.sinks
        return FixedKeyValueState(*attention_tail.join_tail(*state, count, window, sinks))

    def merged(self, states: Sequence[KeyValueState]) -> KeyValueState:
        """Like `StateKind.merged`; where one is quantised, the others become so."""
        if any(state.is_quantized for state in states):
            states = [self.quantized(state) for state in states]
        used, capacity = (
            max(state.used for state in states),
            max(state.capacity for state in states),
        )
        return KeyValueState.merged([state.widened(used, capacity) for state in states])

    def selected(self, state: KeyValueState, rows: mx.array, length: int) -> KeyValueState:
        slots = slots_after(0, length, self.cache.window, self.cache.sinks)
        # capacity up to the next step, if there is so much; no row holds a token after it
        capacity = -(-slots // GROWTH_STEP) * GROWTH_STEP
        keys, values = tree_map(lambda buffer: buffer[:, :, :capacity][rows], state[:2])
        return KeyValueState(keys, values, state.positions[:, :slots][rows])

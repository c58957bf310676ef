"""How attention reads the tokens of a call into its keys and values."""

from typing import NamedTuple, cast

import mlx.core as mx

from ..ops.attention import Mask
from ..ops.slots import held_positions, new_slots, slots_after, write_slots
from .key_value_state import Buffer, KeyValueState, each, length_of, padded
from .positions import sample_begins
from .quantized_array import QuantizedArray


class Reading(NamedTuple):
    """Where the tokens of a call stand, which slots they take, and what they see.

    It depends on how many tokens the rows hold, not on what these are, so that layers share it.

    Attributes:
        start: Number of tokens read before, a number or `(B,)`.
        places: The position of each token in its row, `(1, L)` or `(B, L)`.
        begins: Where in its row the sample of each token begins, `(B, L)`; `None`: at 0.
        slots: Where the tokens of the call go, as `new_slots` gives it; `None` if slots are filled anew.
        source: What each slot is filled with then, `(B, C)`: the number of a token, of those in slots
            before and those of the call behind them.
        positions: The position that each slot holds afterwards, `(B, C)`, -1 for none.
        seen: The position of each key that the call sees, `(B, N)`, -1 for none; `None`: its own.
        mask: What each query sees.
    """

    start: int | mx.array
    places: mx.array
    begins: mx.array | None
    slots: mx.array | None
    source: mx.array | None
    positions: mx.array
    seen: mx.array | None
    mask: Mask

    @property
    def offset(self) -> int | mx.array:
        """Positions within samples: of the first token, a number or `(B,)`, or of each, `(B, L)`."""
        return self.start if self.begins is None else self.places - self.begins


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
    places = column + mx.arange(length)[None]
    begins = None if starts is None else sample_begins(starts, start)
    end = mx.broadcast_to(start + (length if counts is None else counts), (batch,))
    end = end.astype(mx.int32)
    count = slots_after(used, length, window, sinks)
    is_full = count < used + length
    seen = slots = source = None
    if begins is not None or (is_full and (length > 1 or counts is not None)):
        begin = 0 if begins is None else begins[:, -1:]
        held = held_positions(end if begins is None else end - begins[:, -1], count, window, sinks)
        place = held + begin
        source = mx.where(place >= column, used + place - column, mx.arange(count))
        if used:
            own = mx.where(places < end[:, None], places, -1)
            seen = mx.concatenate([positions, own], axis=1)
    else:
        slots = new_slots(start, length, window, sinks)
        held = held_positions(end, count, window, sinks)
        seen = held if used else None
    mask = _mask(seen, places, begins, window, sinks, step)
    if counts is not None and isinstance(mask, mx.array):
        mask = _without_empty_rows(mask)
    return Reading(start, places, begins, slots, source, held, seen, mask)


def _mask(
    seen: mx.array | None,
    places: mx.array,
    begins: mx.array | None,
    window: int | None,
    sinks: int,
    step: int,
) -> Mask:
    if seen is None:
        length = places.shape[1]
        is_short = window is None or length <= sinks + window
        if is_short and begins is None:
            return "causal" if length > 1 else None
        # (1, N): the call's own tokens
        seen = mx.arange(length)[None]
    query, key = places[..., None], seen[:, None]
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


def first_seen(place: mx.array, window: int, step: int) -> mx.array:
    """The first position that a window shows to one, if it moves on by `step` tokens at a time."""
    return (place // step + 1) * step - window


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


def sink_places(
    reading: Reading, batch: int, count: int, sinks: int, farthest: int
) -> tuple[mx.array, mx.array]:
    """Where queries stand for the sinks, and which keys are sinks.

    Args:
        reading: That of the call.
        batch: Number of rows.
        count: Number of keys `N`.
        sinks: Number of first tokens that stay.
        farthest: The position of a query behind a full window, from which the sinks look as near as
            if the text between had never been.

    Returns:
        Positions `(B, L)` and booleans `(B, 1, N, 1)`.
    """
    query, length = reading.places, reading.places.shape[1]
    key = mx.arange(length)[None] if reading.seen is None else reading.seen
    if reading.begins is not None:
        query = query - reading.begins
        # the tokens before the call belong to a text that began at 0
        key = key - mx.pad(reading.begins, [(0, 0), (count - length, 0)])
    places = mx.broadcast_to(mx.minimum(query, farthest), (batch, length))
    return places, (key < sinks)[:, None, :, None]


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
    used, dims = state.used, (keys.shape[-1], values.shape[-1])
    new = (_stored(keys, state.keys), _stored(values, state.values))
    if reading.source is not None:
        both = each(
            lambda old, own: mx.concatenate([old[:, :, :used], own], axis=2), state[:2], new
        )
        source = reading.source[:, None, :, None]
        keys, values = each(lambda buffer: mx.take_along_axis(buffer, source, axis=2), both)
        return *_exact(both, dims), KeyValueState(keys, values, reading.positions)
    length = length_of(new[0])
    free = state.room_for(length, window, sinks) - length
    if used == 0 and free > 0:
        # the first tokens take the first slots
        kept = padded(new, free)
        return *_exact(new, dims), KeyValueState(kept[0], kept[1], reading.positions)
    state = state.with_room(length, window, sinks)
    slots = cast(mx.array, reading.slots)
    kept = each(lambda buffer, own: write_slots(buffer, own, slots), state[:2], new)
    attended = new
    if used:
        attended = each(lambda buffer: buffer[:, :, : reading.positions.shape[1]], kept)
    return *_exact(attended, dims), KeyValueState(kept[0], kept[1], reading.positions)


def _stored(x: mx.array, buffer: Buffer) -> Buffer:
    """Vectors in the form of the buffer."""
    if isinstance(buffer, QuantizedArray):
        x = x.astype(buffer.scales.dtype)
        return QuantizedArray.encode(x, buffer.quantization(x.shape[-1]))
    return x.astype(buffer.dtype)


def _exact(buffers: tuple[Buffer, Buffer], dims: tuple[int, int]) -> tuple[mx.array, mx.array]:
    keys, values = (
        buffer.decode(size) if isinstance(buffer, QuantizedArray) else buffer
        for buffer, size in zip(buffers, dims, strict=True)
    )
    return keys, values

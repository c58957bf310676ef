"""The keys that tokens of a call see, in a state and in the call, for the definition of attention."""

from typing import NamedTuple, cast

import mlx.core as mx

from ...ops.attention import Mask
from ..context import Context
from . import key_values
from .options import KeyValueCache


class Seen(NamedTuple):
    """Where the tokens of a call stand, and what each sees.

    Attributes:
        offset: Positions within samples: of the first token, a number or `(B,)`, or of each, `(B, L)`.
        mask: As of `ops.attention`, for keys of the state and then of the call.
        relative: The position of each key less the query's, `(B or 1, L, N)`.
        reading: How the state takes the call; `None`: there is no state.
    """

    offset: int | mx.array
    mask: Mask
    relative: mx.array
    reading: key_values.Reading | None


def see(
    state: key_values.KeyValueState | tuple[()], length: int, context: Context, cache: KeyValueCache
) -> Seen:
    """The keys that `length` tokens of a call see.

    Args:
        state: The tokens before; `()`: each token sees those on both sides.
        length: Tokens `L`.
        context: The call.
        cache: The window, and how it moves.
    """
    counts, starts = context.counts, context.starts
    if isinstance(state, key_values.KeyValueState):
        reading = key_values.read(
            state.positions, length, counts, starts, cache.window, cache.sinks, cache.step
        )
        return Seen(reading.offset, reading.mask, relative_positions(reading, cache), reading)
    offset, mask = key_values.read_whole(length, counts, starts)
    token = mx.arange(length)
    if cache.window is not None:
        start = token[None] if starts is None else offset
        step = cast(mx.array, start) // cache.step
        reach = cache.window // cache.step - 1
        is_near = mx.abs(step[:, None] - step[..., None]) <= reach
        mask = (
            is_near[:, None]
            if mask is None
            else mx.logical_and(cast(mx.array, mask), is_near[:, None])
        )
        mask = mx.logical_or(mask, mx.logical_not(mx.any(mask, axis=-1, keepdims=True)))
    return Seen(offset, mask, token[None, None] - token[:, None], None)


def relative_positions(reading: key_values.Reading, cache: KeyValueCache) -> mx.array:
    """The position of each key less the query's, `(B, L, N)`."""
    query, key = reading.token_positions, reading.seen
    if key is None:
        key = mx.arange(query.shape[1])[None]
    relative = key[:, None] - query[..., None]
    if not cache.sinks:
        return relative
    batch, count = reading.positions.shape[0], key.shape[1]
    near, is_sink = key_values.sink_positions(reading, batch, count, cache.sinks, cache.farthest)
    if reading.begins is not None:
        near = near + reading.begins
    return mx.where(is_sink[:, 0].swapaxes(1, 2), key[:, None] - near[..., None], relative)

"""Attention of any number of tokens, between the projections."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..ops import Rotation, attention, rotated_heads
from ..ops.attention import Mask
from .attention_options import KeyValueCache
from .context import Context
from .heads import merge_heads
from .key_value_reading import Reading, extend, read, read_whole, sink_places
from .key_value_state import KeyValueState
from .padding import RealTokens
from .position_bias import PositionBias
from .rope import RoPE
from .sequence_blocks import SequenceBlocks, near_mask

Mix = Callable[[mx.array, mx.array, mx.array, Mask, mx.array | None], mx.array]
"""Weights values by queries and keys: called with queries, keys, values, mask and bias, of the shapes
of `ops.attention`."""


def softmax_mix(
    queries: mx.array, keys: mx.array, values: mx.array, mask: Mask, bias: mx.array | None
) -> mx.array:
    """The weights of ordinary attention."""
    return attention(queries, keys, values, mask, bias=bias)


class Heads(NamedTuple):
    """What attention does with the heads of projected tokens.

    Attributes:
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`.
        cache: Which tokens are seen.
        query_norm: Norm of each query; `None`: there is none.
        key_norm: Norm of each key; `None`: there is none.
        query_scale: What queries are multiplied by before the root of their dims divides them.
        rope: Rotates queries and keys; `None`: they stay.
        position_bias: Adds to the scores; `None`: nothing does.
        mix: Weights the values.
    """

    num_heads: int
    num_kv_heads: int
    cache: KeyValueCache
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    query_scale: float = 1.0
    rope: RoPE | None = None
    position_bias: PositionBias | None = None
    mix: Mix = softmax_mix

    def split(self, projected: mx.array) -> tuple[tuple[mx.array, ...], mx.array]:
        """Queries and keys, and values, of projected tokens `(B, L, (H + 2G) K)`.

        Returns:
            Queries `(B, H, L, K)` and keys `(B, G, L, K)` with their norms, in one array where nothing
            is done to one of them alone; and values `(B, G, L, K)`.
        """
        count = self.num_heads + self.num_kv_heads
        tokens = mx.unflatten(projected, -1, (count + self.num_kv_heads, -1))
        both, values = mx.split(tokens.swapaxes(1, 2), [count], axis=1)
        if self.query_norm is None and self.key_norm is None and self.query_scale == 1.0:
            return (both,), values
        queries, keys = self.apart((both,))
        queries = queries if self.query_norm is None else self.query_norm(queries)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        queries = queries if self.query_scale == 1.0 else queries * self.query_scale
        return (queries, keys), values

    def apart(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        """Queries and keys of one array or two."""
        queries, keys = (
            mx.split(arrays[0], [self.num_heads], axis=1) if len(arrays) == 1 else arrays
        )
        return queries, keys

    def rotated(
        self,
        arrays: tuple[mx.array, ...],
        offset: int | mx.array,
        which: tuple[Any, ...],
        context: Context,
    ) -> tuple[mx.array, ...]:
        """Arrays `(B, heads, L, K)`, rotated; `which` tells the offsets of a call apart."""
        rope, length = self.rope, arrays[0].shape[2]
        if rope is None:
            return arrays
        rotation = context.once(
            ("rotation", id(rope), *which), lambda: rope.rotation(offset, length)
        )
        return tuple(rope.rotate(x, rotation) for x in arrays)

    def read(
        self,
        projected: mx.array,
        offset: int | mx.array,
        which: tuple[Any, ...],
        context: Context,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries `(B, H, L, K)` and keys, and values, `(B, G, L, K)`, of projected tokens."""
        rope = self.rope
        has_norm = self.query_norm is not None or self.key_norm is not None
        if rope is None or rope.wavelengths is None or has_norm or self.query_scale != 1.0:
            plain, values = self.split(projected)
            return *self.apart(self.rotated(plain, offset, which, context)), values
        waves = rope.wavelengths
        rotation = context.once(
            ("angles", id(rope), *which), lambda: Rotation.of(offset, projected.shape[1], waves)
        )
        return rotated_heads(
            projected,
            rotation,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            is_interleaved=rope.is_interleaved,
        )

    def bias(
        self, relative: Callable[[], mx.array], which: tuple[Any, ...], context: Context
    ) -> mx.array | None:
        """The term of scores by relative positions `(B, L, N)`; `which` tells those of a call apart."""
        bias = self.position_bias
        if bias is None:
            return None
        return context.once(("bias", id(bias), *which), lambda: bias(relative()))


def attend(
    projected: mx.array,
    state: KeyValueState | tuple[()],
    heads: Heads,
    context: Context,
    tokens: RealTokens,
) -> tuple[mx.array, KeyValueState | tuple[()]]:
    """Attention of tokens to those before them, or without a state to the whole sequence.

    Args:
        projected: Heads of queries, keys and values, one behind the other, `(B, L, (H + 2G) K)`.
        state: The tokens before; `()` where attention is not causal.
        heads: What is done with the heads.
        context: The call.
        tokens: Those of the call that are no padding.

    Returns:
        `(B, L, H K)` and the state.
    """
    if isinstance(state, KeyValueState):
        y, state = _attend_before(projected, state, heads, context, tokens)
    else:
        y = _attend_around(projected, heads, context, tokens)
    return merge_heads(y).astype(projected.dtype), state


def _attend_before(
    projected: mx.array, state: KeyValueState, heads: Heads, context: Context, tokens: RealTokens
) -> tuple[mx.array, KeyValueState]:
    """Attention of each token to itself and those before it, `(B, H, L, K)`."""
    length, (counts, starts) = projected.shape[1], tokens
    window, sinks, step = heads.cache.window, heads.cache.sinks, heads.cache.step
    which, before = (state.used, length, window, sinks, step), state.positions
    reading = context.once(
        ("reading", *which), lambda: read(before, length, counts, starts, window, sinks, step)
    )
    queries, keys, values = heads.read(projected, reading.offset, which, context)
    keys, values, state = extend(state, keys, values, reading, window, sinks)
    mask = reading.mask
    if sinks and heads.rope is not None and not isinstance(mask, str | None):
        near = heads.apart(heads.split(projected)[0])[0]
        queries, keys = _near_sinks(heads, near, queries, keys, reading, which, context)
    bias = heads.bias(lambda: _relative(reading, heads.cache), which, context)
    return heads.mix(queries, keys, values, mask, bias), state


def _relative(reading: Reading, cache: KeyValueCache) -> mx.array:
    """The position of each key less that of the query, `(B, L, N)`."""
    query, key = reading.places, reading.seen
    if key is None:
        key = mx.arange(query.shape[1])[None]
    relative = key[:, None] - query[..., None]
    if not cache.sinks:
        return relative
    batch, count = reading.positions.shape[0], key.shape[1]
    near, is_sink = sink_places(reading, batch, count, cache.sinks, _farthest(cache))
    if reading.begins is not None:
        near = near + reading.begins
    return mx.where(is_sink[:, 0].swapaxes(1, 2), key[:, None] - near[..., None], relative)


def _attend_around(
    projected: mx.array, heads: Heads, context: Context, tokens: RealTokens
) -> mx.array:
    """Attention of each token to those on both sides, `(B, H, L, K)`."""
    length, (counts, starts), cache = projected.shape[1], tokens, heads.cache
    offset, mask = context.once(("whole", length), lambda: read_whole(length, counts, starts))
    queries, keys, values = heads.read(projected, offset, ("whole", length), context)
    if cache.window is None:
        token = mx.arange(length)
        bias = heads.bias(lambda: token[None, None] - token[:, None], ("whole", length), context)
        return heads.mix(queries, keys, values, mask, bias)
    window, step, batch = cache.window, cache.step, projected.shape[0]
    blocks = SequenceBlocks.of_window(length, window)
    which = ("near", length, blocks.size)
    near = context.once(
        (*which, window, step), lambda: near_mask(blocks, counts, starts, window, step)
    )
    bias = heads.bias(lambda: blocks.relative, which, context)
    y = heads.mix(
        blocks.own(queries),
        blocks.near(keys),
        blocks.near(values),
        blocks.every_row(near, batch),
        bias,
    )
    return blocks.joined(y)


def _farthest(cache: KeyValueCache) -> int:
    """The position of a query behind a full window."""
    return cache.sinks + (cache.window or 0) - 1


def _near_sinks(
    heads: Heads,
    plain: mx.array,
    queries: mx.array,
    keys: mx.array,
    reading: Reading,
    which: tuple[Any, ...],
    context: Context,
) -> tuple[mx.array, mx.array]:
    """Queries and keys of twice the dims: for sinks, a query stands right behind a full window."""
    batch, count, sinks = plain.shape[0], keys.shape[2], heads.cache.sinks
    farthest = _farthest(heads.cache)
    at, is_sink = context.once(
        ("sinks", *which), lambda: sink_places(reading, batch, count, sinks, farthest)
    )
    (near,) = heads.rotated((plain,), at, ("sinks", *which), context)
    zero = mx.zeros((), keys.dtype)
    others = mx.where(is_sink, zero, keys)
    of_sinks = mx.where(is_sink, keys, zero)
    # twice the dims would halve the scale's square
    queries = mx.concatenate([queries, near], axis=-1) * 2**0.5
    return queries, mx.concatenate([others, of_sinks], axis=-1)

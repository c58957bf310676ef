"""Attention by steps of one token and chunks of long calls, and values that layers of a call share.

`ServedAttention.attend` computes what `SelfAttention.mix` defines, for queries, keys and values that lie
side by side as their projections give them.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx

from ...ops import Rotation
from ...ops.attention import Mask
from ...ops.attention_step import Options, next_slot, operation, without_gates
from ...ops.attention_tail import Tail, next_tail_slot
from ...ops.attention_tail import operation as tail_operation
from ...ops.rotated_heads import operation as rotate_operation
from ...ops.splitting import split_many
from ..context import Context
from ..fusing import Parts, beside, fuses
from ..mixer import TokenMixer
from ..quantization import Quantization
from . import key_values
from .options import KeyValueCache
from .seen import relative_positions

SelfAttentionState = key_values.AnyKeyValueState | tuple[()]

CHUNK = 256
"""Tokens that are read at a time at least, where a long call is read in chunks."""


class ServedAttention(TokenMixer):
    """The part of `SelfAttention` that reads calls as they are served.

    Attributes:
        num_heads, num_kv_heads, head_dim: As the arguments of `SelfAttention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    _is_gated: bool
    _cache: KeyValueCache

    @property
    def _name(self) -> str:
        return type(self).__name__

    def weigh(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: Mask,
        bias: mx.array | None,
    ) -> mx.array:
        """Weights the values; arguments and result as in `ops.attention`."""
        raise NotImplementedError

    def fused(
        self, parts: Parts, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        return self.attend(beside(parts), state, context)

    def _mixed(
        self, parts: Parts, state: SelfAttentionState, context: Context, **arguments: Any
    ) -> tuple[mx.array, SelfAttentionState]:
        if isinstance(state, key_values.FIXED):
            # its shapes serve the compiled step alone
            return self.fused(parts, state, context)
        first = None if fuses() else self._exact_tokens(state)
        if first == 0:
            state = cast(key_values.KeyValueState, state).quantized(
                cast(Quantization, self._cache.quantization)
            )
        elif first is not None and first < parts[0].shape[1]:
            results = []
            for start, stop in ((0, first), (first, parts[0].shape[1])):
                chunk = tuple(part[:, start:stop] for part in parts)
                y, state = self._mixed(chunk, state, context.part(start, stop), **arguments)
                results.append(y)
            return mx.concatenate(results, axis=1), state
        y, state = super()._mixed(parts, state, context, **arguments)
        return y, state

    def _exact_tokens(self, state: SelfAttentionState) -> int | None:
        """The tokens that are read before the state is quantised; `None`: it is already, or never is."""
        is_exact = isinstance(state, key_values.KeyValueState) and isinstance(state.keys, mx.array)
        if self._cache.quantization is None or not is_exact:
            return None
        used = cast(key_values.KeyValueState, state).used
        return max(0, cast(int, self._cache.exact_slots) - used)

    def attend(
        self, projected: mx.array, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        """Attention of the tokens of a call to each other and to a state, times their gates.

        Args:
            projected: Heads of queries, each with its gate after it if there are some, keys and values,
                one after the other, `(B, L, (H + 2G) K)` or `(B, L, (2H + 2G) K)`.
            state: The tokens before; `()` where attention is not causal.
            context: The call, whose padding stands after the tokens.

        Returns:
            `(B, L, H K)` and the state.
        """
        length = projected.shape[1]
        is_fixed = isinstance(state, key_values.FIXED)
        if not length or (is_fixed and not projected.size):
            shape = (projected.shape[0], length, self.num_heads * self.head_dim)
            return mx.zeros(shape, projected.dtype), state
        is_plain = context.counts is None and context.starts is None
        if is_fixed and not is_plain:
            raise ValueError(
                f"[{self._name}] 'x' must come without 'valid' and 'starts' while the state has fixed "
                "shapes. Make it ordinary by 'growing' of its kind."
            )
        quantization, first = self._cache.quantization, self._exact_tokens(state)
        is_exact = is_fixed or (
            isinstance(state, key_values.KeyValueState) and isinstance(state.keys, mx.array)
        )
        is_exact = is_exact and first != 0
        is_step = length == 1 and is_plain and is_exact and projected.size
        # a layer that does not take steps has no state of fixed shapes
        if is_step and (is_fixed or self.state_kind.takes_steps):
            return self._step(projected, state, context)
        if first is not None and first < length and context.starts is not None:
            raise ValueError(
                f"[{self._name}] 'starts' must be None while the state is still to be quantised but got "
                f"{context.starts.shape}. Set 'quantization_start' to 0 or leave out the quantization."
            )
        if first == 0:
            state = cast(key_values.KeyValueState, state).quantized(
                cast(Quantization, quantization)
            )
        is_bounded = self._cache.window is not None or "position_bias" in self
        cuts: list[int] = []
        if length > 1 and (is_fixed or is_bounded or first is not None):
            cuts = self._cuts(state, length, first)
        if cuts:
            parts = []
            chunks = pairwise((0, *cuts, length))
            for chunk, (start, stop) in zip(split_many(projected, cuts, 1), chunks, strict=True):
                y, state = self.attend(chunk, state, context.part(start, stop))
                parts.append(y)
            return mx.concatenate(parts, axis=1), state
        gate = None
        if self._is_gated:
            projected, gate = without_gates(projected, self.num_heads, self.head_dim)
        if isinstance(state, key_values.KeyValueState):
            y, state = self.attend_before(projected, state, context)
        else:
            y = self.attend_around(projected, context)
        y = mx.flatten(y.swapaxes(1, 2), 2).astype(projected.dtype)
        return y if gate is None else y * mx.sigmoid(gate), state

    def _cuts(self, state: SelfAttentionState, length: int, first: int | None) -> list[int]:
        """Where a call is cut to be read in chunks; the state is quantised after `first` tokens.

        In fixed shapes, tokens are read one by one, so that a draft model's are read as others are.

        With a window, a token of a long call costs what one of a short call does. With a bias, the
        scores of a chunk are alive at once rather than all scores of the call.
        """
        if isinstance(state, key_values.FIXED):
            return list(range(1, length))
        cuts = set() if first is None or not 0 < first < length else {first}
        if isinstance(state, key_values.KeyValueState) and (
            self._cache.window or "position_bias" in self
        ):
            size = max(self._cache.capacity or 0, CHUNK)
            if length > 2 * size:
                cuts |= set(range(size, length, size))
        return sorted(cuts)

    def _step(
        self, projected: mx.array, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        """Like `attend`, of one token to itself and the tokens of an exact state."""
        window, sinks = self._cache.window, self._cache.sinks
        keys, values, positions = cast("tuple[mx.array, mx.array, mx.array]", state[:3])
        tail = state.tail if isinstance(state, key_values.TailedKeyValueState) else None
        if positions.shape[1] == keys.shape[2] and isinstance(state, key_values.KeyValueState):
            roomy = state.with_capacity(1, window, sinks)
            keys, values = cast("tuple[mx.array, mx.array]", roomy[:2])
        rope, query_norm, key_norm = self.get("rope"), self.get("query_norm"), self.get("key_norm")
        waves, is_interleaved = None, False
        if rope is not None:
            waves, is_interleaved = rope.wavelengths, rope.is_interleaved
        of_queries, of_keys, eps = None, None, 1e-6
        if query_norm is not None and key_norm is not None:
            weight, of_keys, eps = query_norm["weight"], key_norm["weight"], query_norm.eps
            of_queries = weight if rope is None else rope.scaled(weight)
        elif rope is not None and rope.query_scale != 1.0:
            dims = self.num_heads * self.head_dim
            queries, others = mx.split(projected, [dims], axis=-1)
            queries = rope.scaled(mx.unflatten(queries, -1, (self.num_heads, -1)))
            projected = mx.concatenate([mx.flatten(queries, -2), others], axis=-1)
        # layers share the slot of the token and its rotation, where a backend asks for them
        capacity, used = keys.shape[2], positions.shape[1]
        which: tuple[Any, ...] = (used, capacity, window, sinks)
        found: Callable[[], Any] = partial(next_slot, positions, capacity, window, sinks)
        if tail is not None:
            which = ("tail", *which)
            found = partial(next_tail_slot, positions, tail.used, window, sinks)
        slot = partial(context.memoised, ("slot", *which), found)
        angles = None
        if waves is not None:
            turned = partial(_angles, slot, waves)
            angles = partial(context.memoised, ("step", id(rope), *which), turned)
        # the operation itself, because each decoded token comes here in each layer
        options = Options(
            self.num_heads,
            waves,
            is_interleaved,
            of_queries,
            of_keys,
            eps,
            window,
            sinks,
            slot,
            angles,
            self._is_gated,
        )
        if tail is not None:
            y, *after = tail_operation(projected, keys, values, positions, tail, options)
            return y, cast(Any, state)._replace(tail=Tail(*after))
        y, *new = operation(projected, keys, values, positions, options)
        return y, cast(Any, type(state))(*new)

    def attend_before(
        self,
        projected: mx.array,
        state: key_values.KeyValueState,
        context: Context,
    ) -> tuple[mx.array, key_values.KeyValueState]:
        """Attention of each token to itself and those before it, `(B, H, L, K)`."""
        length, cache = projected.shape[1], self._cache
        counts, starts = context.counts, context.starts
        window, sinks, step = cache.window, cache.sinks, cache.step
        before = state.positions
        which = (before.shape[1], length, window, sinks, step)
        reading = context.memoised(
            ("reading", *which),
            lambda: key_values.read(before, length, counts, starts, window, sinks, step),
        )
        queries, keys, values = self._rotated_heads(projected, reading.offset, which, context)
        keys, values, state = key_values.extend(state, keys, values, reading, window, sinks)
        mask = reading.mask
        if sinks and "rope" in self and not isinstance(mask, str | None):
            near = self._apart(self._split(projected)[0])[0]
            queries, keys = self.near_sinks(near, queries, keys, reading, which, context)
        bias = None
        if "position_bias" in self:
            bias = self.bias_of(lambda: relative_positions(reading, cache), which, context)
        return self.weigh(queries, keys, values, mask, bias), state

    def attend_around(self, projected: mx.array, context: Context) -> mx.array:
        """Attention of each token to those on both sides, `(B, H, L, K)`."""
        length, cache = projected.shape[1], self._cache
        counts, starts = context.counts, context.starts
        which: tuple[Any, ...] = ("whole", length)
        offset, mask = context.memoised(
            which, lambda: key_values.read_whole(length, counts, starts)
        )
        queries, keys, values = self._rotated_heads(projected, offset, which, context)
        if cache.window is None:
            token = mx.arange(length)
            bias = self.bias_of(lambda: token[None, None] - token[:, None], which, context)
            return self.weigh(queries, keys, values, mask, bias)
        window, step, batch = cache.window, cache.step, projected.shape[0]
        blocks = key_values.SequenceBlocks.of_window(length, window)
        which = ("near", length, blocks.size)
        near = context.memoised(
            (*which, window, step),
            lambda: key_values.near_mask(blocks, counts, starts, window, step),
        )
        y = self.weigh(
            blocks.own(queries),
            blocks.near(keys),
            blocks.near(values),
            blocks.every_row(near, batch),
            self.bias_of(lambda: blocks.relative, which, context),
        )
        return blocks.merged(y)

    def _split(self, projected: mx.array) -> tuple[tuple[mx.array, ...], mx.array]:
        """Queries and keys, and values, of projected tokens `(B, L, (H + 2G) K)`.

        Returns:
            Queries `(B, H, L, K)` and keys `(B, G, L, K)` with their norms, in one array where nothing
            is done to one of them alone; and values `(B, G, L, K)`.
        """
        count = self.num_heads + self.num_kv_heads
        tokens = mx.unflatten(projected, -1, (count + self.num_kv_heads, -1))
        both, values = mx.split(tokens.swapaxes(1, 2), [count], axis=1)
        rope = self.get("rope")
        if "query_norm" not in self and (rope is None or rope.query_scale == 1.0):
            return (both,), values
        queries, keys = self._apart((both,))
        if "query_norm" in self:
            queries = self["query_norm"](queries)
            keys = self["key_norm"](keys)
        return (queries if rope is None else rope.scaled(queries), keys), values

    def _apart(self, arrays: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        """Queries and keys of one array or two."""
        queries, keys = (
            mx.split(arrays[0], [self.num_heads], axis=1) if len(arrays) == 1 else arrays
        )
        return queries, keys

    def _rotated(
        self,
        arrays: tuple[mx.array, ...],
        offset: int | mx.array,
        which: tuple[Any, ...],
        context: Context,
    ) -> tuple[mx.array, ...]:
        """Arrays `(B, heads, L, K)`, rotated; `which` tells the offsets of a call apart."""
        rope, length = self.get("rope"), arrays[0].shape[2]
        if rope is None:
            return arrays
        rotation = context.memoised(
            ("rotation", id(rope), *which), lambda: rope.rotation(offset, length)
        )
        return tuple(rope.rotate(x, rotation) for x in arrays)

    def _rotated_heads(
        self,
        projected: mx.array,
        offset: int | mx.array,
        which: tuple[Any, ...],
        context: Context,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries `(B, H, L, K)` and keys, and values, `(B, G, L, K)`, of projected tokens."""
        rope = self.get("rope")
        waves = None if rope is None or rope.query_scale != 1.0 else rope.wavelengths
        is_whole = waves is not None and 2 * waves.size == self.head_dim
        is_rotated_here = is_whole and "query_norm" not in self and projected.size
        if rope is None or waves is None or not is_rotated_here:
            plain, values = self._split(projected)
            return *self._apart(self._rotated(plain, offset, which, context)), values
        rotation = context.memoised(
            ("angles", id(rope), *which), lambda: Rotation.of(offset, projected.shape[1], waves)
        )
        heads: tuple[mx.array, mx.array, mx.array] = rotate_operation(
            projected, rotation, self.num_heads, self.num_kv_heads, rope.is_interleaved
        )
        return heads

    def bias_of(
        self, relative: Callable[[], mx.array], which: tuple[Any, ...], context: Context
    ) -> mx.array | None:
        """The term of scores by relative positions `(B, L, N)`; `which` names it within a call."""
        bias = self.get("position_bias")
        if bias is None:
            return None
        return context.memoised(("bias", id(bias), *which), lambda: bias(relative()))

    def near_sinks(
        self,
        plain: mx.array,
        queries: mx.array,
        keys: mx.array,
        reading: key_values.Reading,
        which: tuple[Any, ...],
        context: Context,
    ) -> tuple[mx.array, mx.array]:
        """Queries and keys of twice the dims: for sinks, a query stands right after a full window."""
        batch, count, sinks = plain.shape[0], keys.shape[2], self._cache.sinks
        farthest = self._cache.farthest
        at, is_sink = context.memoised(
            ("sinks", *which),
            lambda: key_values.sink_positions(reading, batch, count, sinks, farthest),
        )
        (near,) = self._rotated((plain,), at, ("sinks", *which), context)
        zero = mx.zeros((), keys.dtype)
        others = mx.where(is_sink, zero, keys)
        of_sinks = mx.where(is_sink, keys, zero)
        # twice the dims would halve the scale's square
        queries = mx.concatenate([queries, near], axis=-1) * 2**0.5
        return queries, mx.concatenate([others, of_sinks], axis=-1)


def _angles(slot: Callable[[], Any], wavelengths: mx.array) -> Rotation:
    """The rotation of one token."""
    return Rotation.of(slot().lengths, 1, wavelengths)

"""Softmax attention of a sequence to itself, which a family of mixers shares."""

from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import mlx.core as mx
import mlx.nn as nn

from ...ops import Rotation
from ...ops.attention import Mask
from ...ops.attention import operation as attention_operation
from ...ops.attention_step import Options, Place, next_place, operation, without_gates
from ...ops.rotated_heads import operation as rotate_operation
from ...ops.splitting import split_many
from ..arguments import check_sequences, check_sizes
from ..context import Context
from ..fusing import Parts, beside
from ..linear import apply_norm, split_heads
from ..mixer import QUERIES_KEYS_VALUES, Group, Linears, Partition, StateKind, TokenMixer
from . import key_values
from .options import GROUP_SIZES, AttentionNorms, KeyValueCache, Quantization
from .positions import PositionBias, RoPE

SelfAttentionState = key_values.KeyValueState | key_values.FixedKeyValueState | tuple[()]

PIECE = 256
"""Tokens that are read at a time at least, where a long call is read in pieces."""


class SelfAttention(TokenMixer):
    r"""Attention whose projections, heads, positions, window and state are told by arguments.

    A mixer of the family calls this constructor with what it is about. It may override `weigh`, which
    weights the values.

    Attributes:
        has_plain_weights: `weigh` is plain softmax attention, which one operation computes for a token.

    Args:
        dims: Model dims `D`.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes the projections.
        bias: Whether queries, keys and values are projected with a bias.
        output_bias: Whether the output is. Default: `bias`.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one after the other.
        is_gated: Each head of queries comes with a gate :math:`g` as wide, from the same projection, and
            what the head reads is multiplied by :math:`\sigma(g)`.
        rope: Rotates queries and keys, made for `head_dim` or for its first dims.
        position_bias: Adds to the scores, made for `num_heads`.
        norms: The norms inside.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens are seen, and how their keys and values are kept.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, or in `fixed_state` a `FixedKeyValueState`; `()` if not causal.
    """

    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    padding_last: ClassVar[bool] = True
    before_output: ClassVar[str] = "output_norm"
    has_plain_weights: bool = True
    partition: Partition | None = Partition(
        QUERIES_KEYS_VALUES,
        norm="output_norm",
        counts=("num_heads", "num_kv_heads"),
        arrays=("sink_logits",),
    )

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = nn.Linear,
        bias: bool = False,
        output_bias: bool | None = None,
        is_stacked: bool = False,
        is_gated: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        norms: AttentionNorms = AttentionNorms(),  # noqa: B008 (frozen)
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(type(self).__name__, dims, num_heads, num_kv_heads, head_dim)
        head_dim = dims // num_heads if head_dim is None else head_dim
        self._dims = dims
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.is_causal = is_causal
        self._is_gated = is_gated
        self._cache = cache
        if cache.sinks and not is_causal:
            raise ValueError(
                f"[{self._name}] 'sinks' must be 0, or positive with 'is_causal' and a 'window', but "
                f"got {cache.sinks}."
            )
        if cache.quantization is not None:
            self._check_groups(cache.quantization)
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        widths = [2 * queries if is_gated else queries, keys, keys]
        names = ("query_proj", "key_proj", "value_proj")
        projections = {name: [width] for name, width in zip(names, widths, strict=True)}
        if is_stacked:
            projections = {"qkv_proj": widths}
            self.partition = None
        self.make_projections(dims, projections, linear, bias=bias)
        output_bias = bias if output_bias is None else output_bias
        self.make_output(num_heads * head_dim, dims, linear, bias=output_bias)
        if rope is not None:
            self.rope = rope
        if position_bias is not None:
            position_bias.check_fits(self._name, num_heads)
            self.position_bias = position_bias
        if norms.qk_eps is not None:
            self.query_norm = nn.RMSNorm(head_dim, eps=norms.qk_eps)
            self.key_norm = nn.RMSNorm(head_dim, eps=norms.qk_eps)
        if norms.output_eps is not None:
            self.output_norm = nn.RMSNorm(num_heads * head_dim, eps=norms.output_eps)

    def _check_groups(self, quantization: Quantization) -> None:
        """Refuses groups that do not divide the dims of a head, with `ValueError`."""
        if self.head_dim % quantization.group_size == 0:
            return
        fitting = [str(size) for size in GROUP_SIZES if self.head_dim % size == 0]
        way_out = f"Use {' or '.join(fitting)}." if fitting else "Keep keys and values exact."
        raise ValueError(
            f"[{self._name}] 'group_size' of the quantization must divide 'head_dim' but got "
            f"{quantization.group_size} for {self.head_dim}. {way_out}"
        )

    def take_part(self, group: Group) -> None:
        if "position_bias" in self:
            self.position_bias = self.position_bias.part(group)

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
        if not queries.size:
            return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)
        y: mx.array = attention_operation(queries, keys, values, mask, bias)
        return y

    def with_state(
        self,
        *,
        max_size: int | None = None,
        quantization: Quantization | None = None,
        quantization_start: int = 0,
    ) -> Self:
        """The same attention, with the same weights, that keeps less in its state.

        Args:
            max_size: The state holds at most so many tokens: the first 4 as sinks, and the last ones
                as a window, unless the mixer's own are smaller.
            quantization: Stores keys and values in few bits.
            quantization_start: When that begins.

        Raises:
            ValueError: There is no room beside the sinks, or the groups do not fit the heads.
        """
        mixer = copy(self)
        if self.is_causal:
            mixer._cache = self._cache.limited(
                self._name, max_size, quantization, quantization_start
            )
            if quantization is not None:
                self._check_groups(quantization)
        return mixer

    @property
    def key_value_dims(self) -> int | None:  # type: ignore[override]
        return self.head_dim if self.is_causal else None

    def score_count(self, batch_size: int, queries: int, length: int, context_length: int) -> int:
        kept = max(0, context_length - length)
        if self._cache.capacity is not None:
            kept = min(kept, self._cache.capacity)
        if not self.has_plain_weights or "position_bias" in self:
            # no kernel keeps them out of memory
            queries = length
        # keys and values in float32 beside them
        a_key = self.num_heads * queries + 2 * self.num_kv_heads * self.head_dim
        return batch_size * a_key * (kept + length)

    @property
    def state_kind(self) -> StateKind:
        if not self.is_causal:
            return super().state_kind
        heads, dims, cache, rope = self.num_kv_heads, self.head_dim, self._cache, self.get("rope")
        takes_steps = self.has_plain_weights and "position_bias" not in self and cache.step == 1
        if rope is not None:
            is_scaled = self._is_gated and "query_norm" not in self and rope.query_scale != 1.0
            takes_steps &= not (is_scaled or rope.wavelengths is None or cache.sinks)
        return key_values.KeyValueKind(heads, dims, cache, takes_steps)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> SelfAttentionState:
        return self.state_kind.blank(batch_size, 0, dtype) if self.is_causal else ()

    def fused(  # type: ignore[override]
        self, parts: Parts, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        return self._attend(beside(parts), state, context)

    def _attend(
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
        is_fixed = isinstance(state, key_values.FixedKeyValueState)
        if not length or (is_fixed and not projected.size):
            shape = (projected.shape[0], length, self.num_heads * self.head_dim)
            return mx.zeros(shape, projected.dtype), state
        is_plain = context.counts is None and context.starts is None
        if is_fixed and not is_plain:
            raise ValueError(
                f"[{self._name}] 'x' must come without 'valid' and 'starts' while the state has fixed "
                "shapes. Make it ordinary by 'growing' of its kind."
            )
        quantization, first = self._cache.quantization, cast(int | None, None)
        is_exact = is_fixed or (
            isinstance(state, key_values.KeyValueState) and isinstance(state.keys, mx.array)
        )
        if quantization is not None and isinstance(state, key_values.KeyValueState) and is_exact:
            # tokens before the state is quantised
            first = max(0, cast(int, self._cache.exact_slots) - state.used)
            is_exact = first > 0
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
            pieces = pairwise((0, *cuts, length))
            for piece, (start, stop) in zip(split_many(projected, cuts, 1), pieces, strict=True):
                y, state = self._attend(piece, state, context.part(start, stop))
                parts.append(y)
            return mx.concatenate(parts, axis=1), state
        gate = None
        if self._is_gated:
            projected, gate = without_gates(projected, self.num_heads, self.head_dim)
        if isinstance(state, key_values.KeyValueState):
            y, state = self._attend_before(projected, state, context)
        else:
            y = self._attend_around(projected, context)
        y = mx.flatten(y.swapaxes(1, 2), 2).astype(projected.dtype)
        return y if gate is None else y * mx.sigmoid(gate), state

    def _cuts(self, state: SelfAttentionState, length: int, first: int | None) -> list[int]:
        """Where a call is cut to be read in pieces; the state is quantised after `first` tokens.

        In fixed shapes, tokens are read one by one, so that a draft model's are read as others are.

        With a window, a token of a long call costs what one of a short call does. With a bias, the
        scores of a piece are alive at once rather than all scores of the call.
        """
        if isinstance(state, key_values.FixedKeyValueState):
            return list(range(1, length))
        cuts = set() if first is None or not 0 < first < length else {first}
        if isinstance(state, key_values.KeyValueState) and (
            self._cache.window or "position_bias" in self
        ):
            size = max(self._cache.capacity or 0, PIECE)
            if length > 2 * size:
                cuts |= set(range(size, length, size))
        return sorted(cuts)

    def _step(
        self, projected: mx.array, state: SelfAttentionState, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        """As `_attend`, of one token to itself and the tokens of an exact state."""
        window, sinks = self._cache.window, self._cache.sinks
        keys, values, positions = cast("tuple[mx.array, mx.array, mx.array]", state)
        if positions.shape[1] == keys.shape[2] and isinstance(state, key_values.KeyValueState):
            roomy = state.with_room(1, window, sinks)
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
        # layers share the place of the token and its rotation, where a backend asks for them
        room, used = keys.shape[2], positions.shape[1]
        which = (used, room, window, sinks)
        found = partial(next_place, positions, room, window, sinks)
        place = partial(context.once, ("place", *which), found)
        angles = None
        if waves is not None:
            turned = partial(_angles, place, waves)
            angles = partial(context.once, ("step", id(rope), *which), turned)
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
            place,
            angles,
            self._is_gated,
        )
        y, *new = operation(projected, keys, values, positions, options)
        return y, cast(Any, type(state))(*new)

    def _attend_before(
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
        reading = context.once(
            ("reading", *which),
            lambda: key_values.read(before, length, counts, starts, window, sinks, step),
        )
        queries, keys, values = self._rotated_heads(projected, reading.offset, which, context)
        keys, values, state = key_values.extend(state, keys, values, reading, window, sinks)
        mask = reading.mask
        if sinks and "rope" in self and not isinstance(mask, str | None):
            near = self._apart(self._split(projected)[0])[0]
            queries, keys = self._near_sinks(near, queries, keys, reading, which, context)
        bias = None
        if "position_bias" in self:
            bias = self._bias(lambda: _relative(reading, cache), which, context)
        return self.weigh(queries, keys, values, mask, bias), state

    def _attend_around(self, projected: mx.array, context: Context) -> mx.array:
        """Attention of each token to those on both sides, `(B, H, L, K)`."""
        length, cache = projected.shape[1], self._cache
        counts, starts = context.counts, context.starts
        which: tuple[Any, ...] = ("whole", length)
        offset, mask = context.once(which, lambda: key_values.read_whole(length, counts, starts))
        queries, keys, values = self._rotated_heads(projected, offset, which, context)
        if cache.window is None:
            token = mx.arange(length)
            bias = self._bias(lambda: token[None, None] - token[:, None], which, context)
            return self.weigh(queries, keys, values, mask, bias)
        window, step, batch = cache.window, cache.step, projected.shape[0]
        blocks = key_values.SequenceBlocks.of_window(length, window)
        which = ("near", length, blocks.size)
        near = context.once(
            (*which, window, step),
            lambda: key_values.near_mask(blocks, counts, starts, window, step),
        )
        y = self.weigh(
            blocks.own(queries),
            blocks.near(keys),
            blocks.near(values),
            blocks.every_row(near, batch),
            self._bias(lambda: blocks.relative, which, context),
        )
        return blocks.joined(y)

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
            queries = apply_norm(self["query_norm"], queries)
            keys = apply_norm(self["key_norm"], keys)
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
        rotation = context.once(
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
        rotation = context.once(
            ("angles", id(rope), *which), lambda: Rotation.of(offset, projected.shape[1], waves)
        )
        heads: tuple[mx.array, mx.array, mx.array] = rotate_operation(
            projected, rotation, self.num_heads, self.num_kv_heads, rope.is_interleaved
        )
        return heads

    def _bias(
        self, relative: Callable[[], mx.array], which: tuple[Any, ...], context: Context
    ) -> mx.array | None:
        """The term of scores by relative positions `(B, L, N)`; `which` names it within a call."""
        bias = self.get("position_bias")
        if bias is None:
            return None
        return context.once(("bias", id(bias), *which), lambda: bias(relative()))

    def _near_sinks(
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
        farthest = _farthest(self._cache)
        at, is_sink = context.once(
            ("sinks", *which),
            lambda: key_values.sink_places(reading, batch, count, sinks, farthest),
        )
        (near,) = self._rotated((plain,), at, ("sinks", *which), context)
        zero = mx.zeros((), keys.dtype)
        others = mx.where(is_sink, zero, keys)
        of_sinks = mx.where(is_sink, keys, zero)
        # twice the dims would halve the scale's square
        queries = mx.concatenate([queries, near], axis=-1) * 2**0.5
        return queries, mx.concatenate([others, of_sinks], axis=-1)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences(self._name, x, self._dims)
        (batch, length, _), dims = x.shape, self.head_dim
        if self.prepares:
            x, _ = self.prepare(x, (), Context())
        projected, plain = beside(self.project(x)).astype(mx.float32), copy(self)
        if self._is_gated:
            projected, _ = without_gates(projected, self.num_heads, dims)
        plain._is_gated = False
        known = projected[..., : -self.num_kv_heads * dims]
        parts = []
        for start in range(0, length, dims):
            # one-hot values of so many tokens as a value has dims
            values = mx.tile(mx.eye(length, dims, -start), (batch, 1, self.num_kv_heads))
            y, _ = plain._attend(
                mx.concatenate([known, values], axis=-1),
                self.init_state(batch, mx.float32),
                Context(),
            )
            parts.append(split_heads(y, self.num_heads))
        return mx.concatenate(parts, axis=-1)[..., :length]


def _check_heads(
    place: str, dims: int, num_heads: int, num_kv_heads: int, head_dim: int | None
) -> None:
    """Refuses heads that a model of these dims cannot have, with `ValueError`."""
    check_sizes(place, dims=dims, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if head_dim is not None:
        check_sizes(place, head_dim=head_dim)
    elif dims % num_heads:
        raise ValueError(
            f"[{place}] 'num_heads' must divide 'dims' unless 'head_dim' is given but got {num_heads} "
            f"for {dims} dims."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"[{place}] 'num_kv_heads' must divide 'num_heads' but got {num_kv_heads} for "
            f"{num_heads}."
        )


def _angles(place: Callable[[], Place], wavelengths: mx.array) -> Rotation:
    """The rotation of one token."""
    return Rotation.of(place().lengths, 1, wavelengths)


def _relative(reading: key_values.Reading, cache: KeyValueCache) -> mx.array:
    """The position of each key less the query's, `(B, L, N)`."""
    query, key = reading.places, reading.seen
    if key is None:
        key = mx.arange(query.shape[1])[None]
    relative = key[:, None] - query[..., None]
    if not cache.sinks:
        return relative
    batch, count = reading.positions.shape[0], key.shape[1]
    near, is_sink = key_values.sink_places(reading, batch, count, cache.sinks, _farthest(cache))
    if reading.begins is not None:
        near = near + reading.begins
    return mx.where(is_sink[:, 0].swapaxes(1, 2), key[:, None] - near[..., None], relative)


def _farthest(cache: KeyValueCache) -> int:
    """The position of a query after a full window."""
    return cache.sinks + (cache.window or 0) - 1

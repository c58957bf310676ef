"""Softmax attention of a sequence to itself, which a family of mixers shares."""

from collections.abc import Callable
from copy import copy
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from ...ops import Rotation, attention, attention_step, rotated_heads
from ...ops.attention import Mask
from ...ops.slots import next_place
from ...ops.splitting import split_many
from ..arguments import check_sequences
from ..context import Context, RealTokens, read_without_padding
from ..mixer import (
    QUERIES_KEYS_VALUES,
    Group,
    Linears,
    Partition,
    StateKind,
    StatesByPosition,
    TokenMixer,
    factory_of,
)
from ..projection import merge_heads, project, split_heads
from .key_values import (
    FixedKeyValueState,
    KeyValueKind,
    KeyValueState,
    Reading,
    SequenceBlocks,
    extend,
    near_mask,
    read,
    read_whole,
    sink_places,
)
from .options import AttentionNorms, KeyValueCache, Quantization, check_heads
from .positions import PositionBias, RoPE

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


S = TypeVar("S", KeyValueState, FixedKeyValueState)
GrowingState = KeyValueState | tuple[()]
SelfAttentionState = GrowingState | FixedKeyValueState

PIECE = 256
"""Tokens that are read at a time at least, where a long call is read in pieces."""


def attend_call(
    projected: mx.array,
    state: SelfAttentionState,
    heads: Heads,
    kind: KeyValueKind,
    context: Context,
    tokens: RealTokens,
    *,
    place: str,
) -> tuple[mx.array, SelfAttentionState]:
    """Attention of the tokens of a call to each other and to those of a state.

    Args:
        projected: Heads of queries, keys and values, one behind the other, `(B, L, (H + 2G) K)`.
        state: The tokens before; `()` where attention is not causal.
        heads: What is done with the heads.
        kind: What can be done with the state.
        context: The call.
        tokens: Those of the call that are no padding.
        place: What reports that the tokens do not fit the state.

    Returns:
        `(B, L, H K)` and the state.
    """
    length = projected.shape[1]
    if not length:
        dims = heads.num_heads * projected.shape[2] // (heads.num_heads + 2 * heads.num_kv_heads)
        return mx.zeros((projected.shape[0], 0, dims), projected.dtype), state
    if isinstance(state, FixedKeyValueState):
        if tokens.counts is not None or tokens.starts is not None:
            raise ValueError(
                f"[{place}] 'x' must come without 'valid' and 'starts' while the state has fixed "
                "shapes. Make it ordinary by 'growing' of its kind."
            )
        # one by one, so that proposals of a draft model are read as ordinary tokens are
        pieces, first = list(pairwise(range(length + 1))), None
    elif length == 1 and heads.cache.quantization is None:
        return _attend(projected, state, heads, kind, context, tokens)
    else:
        pieces, first = _pieces(state, length, heads, kind)
    if first is not None and tokens.starts is not None:
        raise ValueError(
            f"[{place}] 'starts' must be None while the state is still to be quantised but got "
            f"{tokens.starts.shape}. Set 'quantization_start' to 0 or leave out the quantization."
        )
    parts = []
    cut = split_many(projected, [stop for _, stop in pieces[:-1]], axis=1)
    for piece, (start, stop) in zip(cut, pieces, strict=True):
        if start == first:
            state = kind.quantized(cast(KeyValueState, state))
        if len(pieces) == 1:
            return _attend(projected, state, heads, kind, context, tokens)
        one, own = context.part(start, stop), tokens.part(start, stop)
        y, state = _attend(piece, state, heads, kind, one, own)
        parts.append(y)
    return mx.concatenate(parts, axis=1), state


def _pieces(
    state: GrowingState, length: int, heads: Heads, kind: KeyValueKind
) -> tuple[list[tuple[int, int]], int | None]:
    """Where a call is cut to be read in pieces, and the piece before which the state is quantised.

    With a window, a token of a long call costs what one of a short call does. With a bias, the scores
    of a piece are alive at once rather than those of the call.
    """
    cuts, capacity = {0, length}, heads.cache.capacity
    first = None if heads.cache.quantization is None else kind.left_exact(state)
    if first is not None and first >= length:
        first = None
    if first is not None:
        cuts.add(first)
    if isinstance(state, KeyValueState):
        is_cut = capacity is not None or heads.position_bias is not None
        size = max(capacity or 0, PIECE)
        if is_cut and length > 2 * size:
            cuts |= set(range(size, length, size))
    return list(pairwise(sorted(cuts))), first


def _attend(
    projected: mx.array,
    state: SelfAttentionState,
    heads: Heads,
    kind: KeyValueKind,
    context: Context,
    tokens: RealTokens,
) -> tuple[mx.array, SelfAttentionState]:
    """Attention of the tokens of one piece."""
    if isinstance(state, FixedKeyValueState):
        return attend_step(projected, state, heads, context)
    is_plain = tokens.counts is None and tokens.starts is None
    if is_plain and projected.shape[1] == 1 and kind.takes_step(state):
        roomy = state.with_room(1, heads.cache.window, heads.cache.sinks)
        return attend_step(projected, roomy, heads, context)
    return attend(projected, state, heads, context, tokens)


def attend_step(
    projected: mx.array, state: S, heads: Heads, context: Context
) -> tuple[mx.array, S]:
    """Attention of one token to itself and those before it.

    Args:
        projected: Heads of its query, key and value, `(B, 1, (H + 2G) K)`.
        state: Exact keys and values, with room for the token.
        heads: What is done with the heads, by weights of plain softmax.
        context: The call.

    Returns:
        `(B, 1, H K)` and the state.
    """
    keys, values, positions = cast("tuple[mx.array, mx.array, mx.array]", state)
    window, sinks = heads.cache.window, heads.cache.sinks
    options: dict[str, Any] = {"window": window, "sinks": sinks}
    if heads.rope is not None:
        options["wavelengths"] = heads.rope.wavelengths
        options["is_interleaved"] = heads.rope.is_interleaved
    scale, query_norm, key_norm = heads.query_scale, heads.query_norm, heads.key_norm
    if query_norm is not None and key_norm is not None:
        weight = query_norm["weight"]
        options["query_norm"] = weight if scale == 1.0 else weight * scale
        options["key_norm"] = key_norm["weight"]
        options["norm_eps"] = query_norm.eps
    elif scale != 1.0:
        dims = heads.num_heads * keys.shape[-1]
        queries, others = mx.split(projected, [dims], axis=-1)
        projected = mx.concatenate([queries * scale, others], axis=-1)
    used, room = positions.shape[1], keys.shape[2]
    place = context.once(
        ("place", used, room, window, sinks),
        lambda: next_place(positions, room, window, sinks),
    )
    y, *new = attention_step(
        projected,
        keys,
        values,
        positions,
        num_heads=heads.num_heads,
        place=place,
        **options,
    )
    return y, type(state)(*new)


class SelfAttention(TokenMixer):
    r"""Attention whose projections, heads, positions, window and state are told by arguments.

    A mixer of the family calls this constructor with what it is about. It may override `mix`, which
    weights the values, and `project_inner`, which makes queries, keys and values.

    Args:
        dims: Model dims `D`.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes the projections.
        bias: Whether queries, keys and values are projected with a bias.
        output_bias: Whether the output is. Default: `bias`.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one behind the other.
        rope: Rotates queries and keys, made for `head_dim`.
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
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        norms: AttentionNorms = AttentionNorms(),  # noqa: B008 (frozen)
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(self._name, dims, num_heads, num_kv_heads, head_dim)
        head_dim = dims // num_heads if head_dim is None else head_dim
        self._dims = dims
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._is_causal = is_causal
        cache.check_fits(self._name, head_dim, is_causal)
        self._cache = cache
        widths = {"query_proj": num_heads, "key_proj": num_kv_heads, "value_proj": num_kv_heads}
        if is_stacked:
            widths = {"qkv_proj": sum(widths.values())}
            self.partition = None
        self._inner = tuple(widths)
        for name, heads in widths.items():
            self[name] = factory_of(linear, name)(dims, heads * head_dim, bias=bias)
        make = factory_of(linear, "output_proj")
        output_bias = bias if output_bias is None else output_bias
        self.output_proj = make(num_heads * head_dim, dims, bias=output_bias)
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

    def take_part(self, group: Group) -> None:
        if "position_bias" in self:
            self.position_bias = self.position_bias.part(group)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def has_plain_weights(self) -> bool:
        """Whether `mix` is plain softmax attention, which one operation computes for a token."""
        return True

    def mix(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: Mask,
        bias: mx.array | None,
    ) -> mx.array:
        """Weights the values; arguments and result as those of `ops.attention`."""
        return attention(queries, keys, values, mask, bias=bias)

    def project_inner(self, x: mx.array, norm: nn.Module | None) -> mx.array:
        """Queries, keys and values of `x`, one behind the other, `(B, L, (H + 2G) K)`."""
        # items, since attributes of a module are slow to find
        return project(x, [self[name] for name in self._inner], norm=norm)

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
        if self._is_causal:
            mixer._cache = self._cache.limited(
                self._name, max_size, quantization, quantization_start
            )
            mixer._cache.check_fits(self._name, self.head_dim, self._is_causal)
        return mixer

    @property
    def key_value_dims(self) -> int | None:  # type: ignore[override]
        return self.head_dim if self._is_causal else None

    def score_count(self, batch_size: int, queries: int, length: int, context_length: int) -> int:
        kept = max(0, context_length - length)
        if self.capacity is not None:
            kept = min(kept, self.capacity)
        if not self.has_plain_weights or "position_bias" in self:
            # no kernel keeps them out of memory
            queries = length
        # keys and values in float32 beside them
        a_key = self.num_heads * queries + 2 * self.num_kv_heads * self.head_dim
        return batch_size * a_key * (kept + length)

    @property
    def capacity(self) -> int | None:
        """The most slots of a state, `None` without a window."""
        return self._cache.capacity

    @property
    def _key_values(self) -> KeyValueKind:
        takes_steps = (
            self.has_plain_weights
            and "position_bias" not in self
            and self._cache.step == 1
            and (
                "rope" not in self
                or (self["rope"].wavelengths is not None and not self._cache.sinks)
            )
        )
        heads, dims = self.num_kv_heads, self.head_dim
        return KeyValueKind(heads, dims, self._cache, takes_steps=takes_steps)

    @property
    def state_kind(self) -> StateKind:
        return self._key_values if self._is_causal else super().state_kind

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> SelfAttentionState:
        return self._key_values.empty(batch_size, dtype) if self._is_causal else ()

    def __call__(
        self,
        x: mx.array,
        state: SelfAttentionState | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, SelfAttentionState]:
        return self._padded(x, state, Context(valid, starts=starts))

    def residual(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: SelfAttentionState | None,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, SelfAttentionState]:
        if context.valid is None:
            check_sequences(self._name, x, self._dims)
            return self._read(x, state, context, RealTokens.all_of(context), norm, x, **arguments)
        y, state = self._padded(x if norm is None else norm(x), state, context, **arguments)
        return x + y, state

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences(self._name, x, self._dims)
        (batch, length, _), dims = x.shape, self.head_dim
        projected = self.project_inner(x, None).astype(mx.float32)
        known = projected[..., : -self.num_kv_heads * dims]
        parts = []
        for start in range(0, length, dims):
            # one-hot values of so many tokens as a value has dims
            values = mx.tile(mx.eye(length, dims, -start), (batch, 1, self.num_kv_heads))
            y, _ = self._attend(
                mx.concatenate([known, values], axis=-1),
                self.init_state(batch, mx.float32),
                Context(),
                RealTokens(None, None),
            )
            parts.append(split_heads(y, self.num_heads))
        return mx.concatenate(parts, axis=-1)[..., :length]

    def _padded(
        self, x: mx.array, state: SelfAttentionState | None, context: Context
    ) -> tuple[mx.array, SelfAttentionState]:
        """Attention of rows with padding, which moves behind their tokens."""
        check_sequences(self._name, x, self._dims)
        return read_without_padding(
            x, context, lambda x, tokens: self._read(x, state, context, tokens)
        )

    def residual_by_position(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: SelfAttentionState | None,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, SelfAttentionState | StatesByPosition]:
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        if self.state_kind.can_rewind(state, x.shape[1]):
            return self.residual(x, norm, state, context, **arguments)
        check_sequences(self._name, x, self._dims)
        projected, parts, states = self.project_inner(x, norm), [], []
        for n in range(x.shape[1]):
            tokens = RealTokens.all_of(context.at(n))
            y, state = self._attend(projected[:, n : n + 1], state, context.at(n), tokens)
            parts.append(y)
            states.append(state)
        y, output_norm = mx.concatenate(parts, axis=1), self.get("output_norm")
        y = project(y, (self["output_proj"],), norm=output_norm, residual=x)
        return y, StatesByPosition(tuple(states))

    def _read(
        self,
        x: mx.array,
        state: SelfAttentionState | None,
        context: Context,
        tokens: RealTokens,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> tuple[mx.array, SelfAttentionState]:
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        projected = self.project_inner(x, norm)
        y, state = self._attend(projected, state, context, tokens)
        output_norm = self.get("output_norm")
        return project(y, (self["output_proj"],), norm=output_norm, residual=residual), state

    def _attend(
        self, projected: mx.array, state: SelfAttentionState, context: Context, tokens: RealTokens
    ) -> tuple[mx.array, SelfAttentionState]:
        """Attention between the projections."""
        return attend_call(
            projected, state, self._heads, self._key_values, context, tokens, place=self._name
        )

    @property
    def _heads(self) -> Heads:
        norms = (self.get("query_norm"), self.get("key_norm"))
        numbers = (self.num_heads, self.num_kv_heads)
        positions = (self.get("rope"), self.get("position_bias"))
        return Heads(*numbers, self._cache, *norms, self._query_scale, *positions, self.mix)

    @property
    def _query_scale(self) -> float:
        """What queries are multiplied by, instead of queries and keys by its root."""
        factor: float = self["rope"].attention_factor if "rope" in self else 1.0
        return factor**2

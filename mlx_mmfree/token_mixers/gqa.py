"""Grouped-query attention (Ainslie et al., arXiv 2305.13245)."""

from copy import copy
from typing import Any, ClassVar, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..layers import project
from ..layers.arguments import check_sequences
from ..layers.attention_options import (
    AttentionNorms,
    KeyValueCache,
    check_heads,
    takes_single_arguments,
)
from ..layers.context import Context
from ..layers.key_value_kind import KeyValueKind
from ..layers.key_value_state import FixedKeyValueState, KeyValueState
from ..layers.linear_factory import Linears, factory_of
from ..layers.padding import RealTokens, padding_last
from ..layers.quantized_array import Quantization
from ..layers.rope import RoPE
from ..layers.sequence_attention import Heads, attend
from ..layers.state_kind import StateKind, StatesByPosition
from ..layers.token_mixer import TokenMixer
from ..ops import attention_step
from ..ops.slots import next_place

S = TypeVar("S", KeyValueState, FixedKeyValueState)
GrowingState = KeyValueState | tuple[()]
GQAState = GrowingState | FixedKeyValueState


class GQA(TokenMixer):
    r"""Softmax attention whose query heads share fewer key and value heads.

    .. math::
        y_t = W_o\,\Big[\sum_{j} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)\,
        v_{j,g(h)}\Big]_{h=1..H}, \quad g(h) = \lfloor h\,G / H \rfloor

    With one key head this is multi-query attention (arXiv 1911.02150), with as many as query heads
    ordinary multi-head attention.

    Args:
        dims: Model dims `D`.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`, a divisor of `H`. Default: `num_heads`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        rope: Rotates queries and keys, made for `head_dim`; `None`: attention without positions.
        norms: The norms inside.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens are seen, and how their keys and values are kept. The fields of `norms`
            and `cache` can still be given one by one, as before they were grouped; that is deprecated.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `KeyValueState`, or in `fixed_state` a `FixedKeyValueState`; `()` if not causal.

    Example:
        >>> y, state = GQA(32, num_heads=4, num_kv_heads=2)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.positions.tolist()
        ((1, 5, 32), [[0, 1, 2, 3, 4]])
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V, keys shared by query heads"
    complexity: ClassVar[str] = "T^2 D"
    paper: ClassVar[str] = "arXiv 2305.13245"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True

    @takes_single_arguments
    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        linear: Linears = nn.Linear,
        bias: bool = False,
        rope: RoPE | None = None,
        norms: AttentionNorms = AttentionNorms(),  # noqa: B008 (frozen)
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(dims, num_heads, num_kv_heads, head_dim)
        head_dim = dims // num_heads if head_dim is None else head_dim
        self._dims = dims
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._is_causal = is_causal
        cache.check_fits(head_dim, is_causal)
        self._cache = cache
        widths = {"query_proj": num_heads, "key_proj": num_kv_heads, "value_proj": num_kv_heads}
        for name, heads in widths.items():
            self[name] = factory_of(linear, name)(dims, heads * head_dim, bias=bias)
        make = factory_of(linear, "output_proj")
        self.output_proj = make(num_heads * head_dim, dims, bias=bias)
        if rope is not None:
            self.rope = rope
        if norms.qk_eps is not None:
            self.query_norm = nn.RMSNorm(head_dim, eps=norms.qk_eps)
            self.key_norm = nn.RMSNorm(head_dim, eps=norms.qk_eps)
        if norms.output_eps is not None:
            self.output_norm = nn.RMSNorm(num_heads * head_dim, eps=norms.output_eps)

    def with_state(
        self,
        *,
        max_size: int | None = None,
        quantization: Quantization | None = None,
        quantization_start: int = 0,
    ) -> "GQA":
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
            mixer._cache = self._cache.limited(max_size, quantization, quantization_start)
            mixer._cache.check_fits(self.head_dim, self._is_causal)
        return mixer

    @property
    def is_causal(self) -> bool:
        return self._is_causal

    @property
    def key_value_dims(self) -> int | None:  # type: ignore[override]
        return self.head_dim if self._is_causal else None

    def score_count(self, batch_size: int, queries: int, length: int, context_length: int) -> int:
        kept = max(0, context_length - length)
        if self.capacity is not None:
            kept = min(kept, self.capacity)
        # keys and values in float32 beside them
        a_key = self.num_heads * queries + 2 * self.num_kv_heads * self.head_dim
        return batch_size * a_key * (kept + length)

    @property
    def capacity(self) -> int | None:
        """The most slots of a state, `None` without a window."""
        return self._cache.capacity

    @property
    def _key_values(self) -> KeyValueKind:
        takes_steps = "rope" not in self or (
            self["rope"].wavelengths is not None and not self._cache.sinks
        )
        heads, dims = self.num_kv_heads, self.head_dim
        return KeyValueKind(heads, dims, self._cache, takes_steps=takes_steps)

    @property
    def state_kind(self) -> StateKind:
        return self._key_values if self._is_causal else super().state_kind

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> GQAState:
        return self._key_values.empty(batch_size, dtype) if self._is_causal else ()

    def __call__(
        self,
        x: mx.array,
        state: GQAState | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, GQAState]:
        return self._padded(x, state, Context(valid, starts=starts))

    def residual(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: GQAState | None,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, GQAState]:
        if context.valid is None:
            check_sequences("GQA", x, self._dims)
            return self._read(x, state, context, RealTokens.all_of(context), norm, x, **arguments)
        y, state = self._padded(x if norm is None else norm(x), state, context, **arguments)
        return x + y, state

    def _padded(
        self, x: mx.array, state: GQAState | None, context: Context
    ) -> tuple[mx.array, GQAState]:
        """Attention of rows with padding, which moves behind their tokens."""
        check_sequences("GQA", x, self._dims)
        valid = context.valid
        if valid is None:
            return self._read(x, state, context, RealTokens.all_of(context))
        order, back, tokens = padding_last(context, valid)
        x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
        x = mx.take_along_axis(x, order[..., None], axis=1)
        y, state = self._read(x, state, context, tokens)
        y = mx.take_along_axis(y, back[..., None], axis=1)
        return mx.where(valid[..., None], y, mx.zeros((), y.dtype)), state

    def residual_by_position(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: GQAState | None,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, GQAState | StatesByPosition]:
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        if self.state_kind.can_rewind(state, x.shape[1]):
            return self.residual(x, norm, state, context, **arguments)
        check_sequences("GQA", x, self._dims)
        inner = (self["query_proj"], self["key_proj"], self["value_proj"])
        projected, parts, states = project(x, inner, norm=norm), [], []
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
        state: GQAState | None,
        context: Context,
        tokens: RealTokens,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
    ) -> tuple[mx.array, GQAState]:
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        # items, since attributes of a module are slow to find
        inner = (self["query_proj"], self["key_proj"], self["value_proj"])
        projected = project(x, inner, norm=norm)
        y, state = self._attend(projected, state, context, tokens)
        output_norm = self.get("output_norm")
        return project(y, (self["output_proj"],), norm=output_norm, residual=residual), state

    def _attend(
        self, projected: mx.array, state: GQAState, context: Context, tokens: RealTokens
    ) -> tuple[mx.array, GQAState]:
        """Attention between the projections."""
        if isinstance(state, FixedKeyValueState):
            if tokens.counts is not None or tokens.starts is not None:
                raise ValueError(
                    "[GQA] 'x' must come without 'valid' and 'starts' while the state has fixed shapes. "
                    "Make it ordinary by 'growing' of its kind."
                )
            if projected.shape[1] == 1:
                return self._step(projected, state, context)
            # one by one, so that proposals of a draft model are read as ordinary tokens are
            parts = []
            for n in range(projected.shape[1]):
                y, state = self._step(projected[:, n : n + 1], state, context.at(n))
                parts.append(y)
            return mx.concatenate(parts, axis=1), state
        first = None if self._cache.quantization is None else self._key_values.left_exact(state)
        if first is None or first >= projected.shape[1]:
            return self._attend_growing(projected, state, context, tokens)
        if tokens.starts is not None:
            raise ValueError(
                "[GQA] 'starts' must be None while the state is still to be quantised but got "
                f"{tokens.starts.shape}. Set 'quantization_start' to 0 or leave out the quantization."
            )
        parts = []
        for part in (slice(0, first), slice(first, None)):
            if part.start == first:
                state = self._key_values.quantized(cast(KeyValueState, state))
            if part.stop != 0:
                one = tokens.part(part)
                y, state = self._attend_growing(projected[:, part], state, context, one)
                parts.append(y)
        return mx.concatenate(parts, axis=1), state

    def _attend_growing(
        self, projected: mx.array, state: GrowingState, context: Context, tokens: RealTokens
    ) -> tuple[mx.array, GrowingState]:
        """Attention with a state of the ordinary form, or none."""
        is_plain = tokens.counts is None and tokens.starts is None
        if is_plain and projected.shape[1] == 1 and self._key_values.takes_step(state):
            roomy = state.with_room(1, self._cache.window, self._cache.sinks)
            return self._step(projected, roomy, context)
        return attend(projected, state, self._heads, context, tokens)

    @property
    def _heads(self) -> Heads:
        norms = (self.get("query_norm"), self.get("key_norm"))
        numbers = (self.num_heads, self.num_kv_heads)
        return Heads(*numbers, self._cache, *norms, self._query_scale, self.get("rope"))

    def _step(self, projected: mx.array, state: S, context: Context) -> tuple[mx.array, S]:
        """Attention of one token, with exact keys and values and room for it."""
        keys, values, positions = cast("tuple[mx.array, mx.array, mx.array]", state)
        options: dict[str, Any] = {"window": self._cache.window, "sinks": self._cache.sinks}
        if "rope" in self:
            rope = self["rope"]
            options["wavelengths"] = rope.wavelengths
            options["is_interleaved"] = rope.is_interleaved
        if "query_norm" in self:
            options["query_norm"] = self.query_norm.weight
            options["key_norm"] = self.key_norm.weight
            options["norm_eps"] = self.query_norm.eps
        scale = self._query_scale
        if scale != 1.0:
            if "query_norm" in self:
                options["query_norm"] = self.query_norm.weight * scale
            else:
                queries, others = mx.split(projected, [self.num_heads * self.head_dim], axis=-1)
                projected = mx.concatenate([queries * scale, others], axis=-1)
        used, room = positions.shape[1], keys.shape[2]
        place = context.once(
            ("place", used, room, self._cache.window, self._cache.sinks),
            lambda: next_place(positions, room, self._cache.window, self._cache.sinks),
        )
        y, *new = attention_step(
            projected, keys, values, positions, num_heads=self.num_heads, place=place, **options
        )
        return y, type(state)(*new)

    @property
    def _query_scale(self) -> float:
        """What queries are multiplied by, instead of queries and keys by its root."""
        factor: float = self["rope"].attention_factor if "rope" in self else 1.0
        return factor**2

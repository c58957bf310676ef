"""Grouped-query attention (Ainslie et al., arXiv 2305.13245)."""

from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, TypeGuard, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..layers import project
from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.attention_options import AttentionNorms, KeyValueCache, takes_single_arguments
from ..layers.key_value_state import (
    Attended,
    FixedKeyValueState,
    KeyValueState,
    extend,
    with_room,
)
from ..layers.linear_factory import Linears, factory_of
from ..layers.quantized_array import Quantization
from ..layers.rope import RoPE
from ..layers.sample_starts import sample_begins
from ..layers.token_mixer import TokenMixer
from ..ops import attention, attention_step
from ..ops.attention import Mask

S = TypeVar("S", KeyValueState, FixedKeyValueState)
GQAState = KeyValueState | FixedKeyValueState | tuple[()]

SINKS = 4
"""First tokens that stay in a state of limited size."""


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
        _check_heads(dims, num_heads, num_kv_heads, head_dim)
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
        if not self._is_causal:
            return mixer
        cache = self._cache
        if max_size is not None:
            check_sizes("GQA", max_size=max_size)
            if not SINKS < max_size < 2**31:
                raise ValueError(
                    f"[GQA] 'max_size' must be larger than {SINKS}, the first tokens that always "
                    f"stay, and below 2**31 but got {max_size}."
                )
            if self.capacity is None or self.capacity > max_size:
                cache = replace(cache, window=max_size - SINKS, sinks=SINKS)
        mixer._cache = replace(
            cache, quantization=quantization, quantization_start=quantization_start
        )
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
    def _window(self) -> int | None:
        return self._cache.window

    @property
    def _sinks(self) -> int:
        return self._cache.sinks

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> GQAState:
        if not self._is_causal:
            return ()
        heads, dims = self.num_kv_heads, self.head_dim
        state = KeyValueState.empty(batch_size, heads, dims, dims, dtype)
        return self._quantized(state) if self._cache.exact_slots == 0 else state

    def blank_state(self, batch_size: int, length: int, dtype: mx.Dtype) -> GQAState:
        state = self.init_state(batch_size, dtype)
        if isinstance(state, KeyValueState):
            exact = self._cache.exact_slots
            if exact is not None and length > exact:
                state = self._quantized(state)
            state = state.blank(length, self._window, self._sinks)
        return state

    def can_rewind(self, state: GQAState, count: int) -> bool:
        exact = self._cache.exact_slots
        if self._window is not None or not isinstance(state, KeyValueState):
            return False
        return exact is None or state.is_quantized or state.positions.shape[1] + count <= exact

    def rewound(self, state: KeyValueState, count: int) -> KeyValueState:
        return state.without_last(count)

    def fixed_state(self, state: GQAState) -> tuple[FixedKeyValueState, int | None] | None:
        if not self._takes_step(state, 1) or self._cache.quantization is not None:
            return None
        fixed = FixedKeyValueState.of(with_room(state, 1, self._window, self._sinks))
        room = fixed.positions.shape[1]
        return fixed, None if room == self.capacity else room - state.positions.shape[1]

    def growing_state(self, state: FixedKeyValueState, unread: int | None) -> KeyValueState:
        return KeyValueState(*state).without_last(unread or 0)

    def _quantized(self, state: KeyValueState) -> KeyValueState:
        quantization = self._cache.quantization
        return state if quantization is None else state.quantized(quantization)

    def __call__(
        self,
        x: mx.array,
        state: GQAState | None = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, GQAState]:
        check_sequences("GQA", x, self._dims)
        if valid is None:
            return self._read(x, state, None, starts=starts)
        # Padding moves behind the tokens, where a causal mask hides it.
        order = mx.argsort(mx.where(valid, 0, x.shape[1]) + mx.arange(x.shape[1]), axis=1)
        x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
        x = mx.take_along_axis(x, order[..., None], axis=1)
        if starts is not None:
            starts = mx.take_along_axis(starts & valid, order, axis=1)
        # over empty rows MLX's sum may never end on a CPU
        counts = valid.sum(axis=1) if x.shape[1] else mx.zeros((x.shape[0],), mx.int32)
        y, state = self._read(x, state, counts, starts=starts)
        y = mx.take_along_axis(y, mx.argsort(order, axis=1)[..., None], axis=1)
        return mx.where(valid[..., None], y, mx.zeros((), y.dtype)), state

    def residual(
        self,
        x: mx.array,
        norm: nn.Module,
        state: GQAState | None = None,
        valid: mx.array | None = None,
        **context: Any,
    ) -> tuple[mx.array, GQAState]:
        check_sequences("GQA", x, self._dims)
        if valid is None:
            return self._read(x, state, None, norm, x, **context)
        return super().residual(x, norm, state, valid, **context)

    def _read(
        self,
        x: mx.array,
        state: GQAState | None,
        counts: mx.array | None,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, GQAState]:
        """`_attend`, in two parts where the state is to be quantised between them."""
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        exact = self._cache.exact_slots
        if exact is None or not isinstance(state, KeyValueState) or state.is_quantized:
            return self._attend(x, state, counts, norm, residual, starts)
        if starts is not None:
            raise ValueError(
                "[GQA] 'starts' must be None while the state is still to be quantised but got "
                f"{starts.shape}. Set 'quantization_start' to 0 or leave out the quantization."
            )
        first = exact - state.positions.shape[1]
        if first <= 0:
            return self._attend(x, self._quantized(state), counts, norm, residual)
        if first >= x.shape[1]:
            return self._attend(x, state, counts, norm, residual)
        parts = []
        for part in (slice(0, first), slice(first, None)):
            real = None
            if counts is not None:
                real = mx.clip(counts - (part.start or 0), 0, first if part.stop else None)
            added = None if residual is None else residual[:, part]
            y, state = self._read(x[:, part], state, real, norm, added)
            parts.append(y)
        return mx.concatenate(parts, axis=1), state

    def _attend(
        self,
        x: mx.array,
        state: GQAState,
        counts: mx.array | None,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, GQAState]:
        """Attention where the first `counts` tokens of each row are real."""
        # items, since attributes of a module are slow to find
        inner = (self["query_proj"], self["key_proj"], self["value_proj"])
        projected = project(x, inner, norm=norm)
        if isinstance(state, FixedKeyValueState):
            if counts is not None or starts is not None:
                raise ValueError(
                    "[GQA] 'valid' and 'starts' must be None with a state of fixed shapes, which "
                    "takes one token of each row at a time. Make it ordinary by 'growing_state'."
                )
            y, state = self._step(projected, state)
        elif counts is None and starts is None and self._takes_step(state, x.shape[1]):
            y, state = self._step(projected, with_room(state, 1, self._window, self._sinks))
        else:
            y, state = self._mix(projected, state, counts, starts)
        output_norm = self.get("output_norm")
        return project(y, (self["output_proj"],), norm=output_norm, residual=residual), state

    def _takes_step(self, state: GQAState, length: int) -> TypeGuard[KeyValueState]:
        """Whether `_step` computes attention with this state to so many tokens."""
        if length != 1 or not isinstance(state, KeyValueState) or state.is_quantized:
            return False
        return "rope" not in self or (self["rope"].wavelengths is not None and not self._sinks)

    def _step(self, projected: mx.array, state: S) -> tuple[mx.array, S]:
        """Attention of one token, with exact keys and values and room for it."""
        options: dict[str, Any] = {}
        if "rope" in self:
            rope = self["rope"]
            options["wavelengths"], options["is_interleaved"] = (
                rope.wavelengths,
                rope.is_interleaved,
            )
        if "query_norm" in self:
            options["query_norm"], options["key_norm"] = (
                self.query_norm.weight,
                self.key_norm.weight,
            )
            options["norm_eps"] = self.query_norm.eps
        sharpness = self._sharpness
        if sharpness != 1.0:
            if "query_norm" in self:
                options["query_norm"] = self.query_norm.weight * sharpness
            else:
                queries, others = mx.split(projected, [self.num_heads * self.head_dim], axis=-1)
                projected = mx.concatenate([queries * sharpness, others], axis=-1)
        y, *new = attention_step(
            projected,
            *cast("tuple[mx.array, mx.array, mx.array]", state),
            num_heads=self.num_heads,
            window=self._window,
            sinks=self._sinks,
            **options,
        )
        return y, type(state)(*new)

    def _mix(
        self,
        projected: mx.array,
        state: KeyValueState | tuple[()],
        counts: mx.array | None,
        starts: mx.array | None,
    ) -> tuple[mx.array, GQAState]:
        """Attention of any number of tokens."""
        length = projected.shape[1]
        start: int | mx.array = 0
        if isinstance(state, KeyValueState) and not state.is_empty:
            start = state.lengths
        begins = None if starts is None else sample_begins(starts, start)
        offset = start if begins is None else _places(start, length) - begins
        kv_dims = self.num_kv_heads * self.head_dim
        query, key, value = mx.split(projected, [-2 * kv_dims, -kv_dims], axis=-1)
        plain_queries = self._heads(query, "query_norm")
        if self._sharpness != 1.0:
            plain_queries = plain_queries * self._sharpness
        queries = self._rotate(plain_queries, offset)
        keys = self._rotate(self._heads(key, "key_norm"), offset)
        values = self._heads(value)
        if isinstance(state, KeyValueState):
            begin = None if begins is None else begins[:, -1]
            attended, state = extend(state, keys, values, counts, self._window, self._sinks, begin)
            mask = self._causal_mask(attended, length, start, begins)
            if self._sinks and "rope" in self and not isinstance(mask, str | None):
                queries, attended = self._near_sinks(
                    plain_queries, queries, attended, start, begins
                )
        else:
            attended = Attended(keys, values, None)
            mask = self._full_mask(length, counts, begins)
        y = attention(queries, attended.keys, attended.values, mask)
        return y.swapaxes(1, 2).reshape(*projected.shape[:2], -1).astype(projected.dtype), state

    @property
    def _sharpness(self) -> float:
        """What queries are multiplied by, instead of queries and keys by its root."""
        factor: float = self["rope"].attention_factor if "rope" in self else 1.0
        return factor**2

    def _heads(self, x: mx.array, norm: str = "") -> mx.array:
        """`(B, L, heads * K)` to `(B, heads, L, K)`, normed if there is such a norm."""
        x = x.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
        return self[norm](x) if norm in self else x

    def _rotate(self, x: mx.array, offset: int | mx.array) -> mx.array:
        y: mx.array = self.rope(x, offset) if "rope" in self else x
        return y

    def _near_sinks(
        self,
        plain: mx.array,
        queries: mx.array,
        attended: Attended,
        start: int | mx.array,
        begins: mx.array | None,
    ) -> tuple[mx.array, Attended]:
        """Queries and keys of twice the dims: for sinks, a query stands right behind a full window."""
        batch, _, length, _ = plain.shape
        farthest = self._sinks + (self._window or 0) - 1
        query = _places(start, length)
        key = mx.arange(length)[None] if attended.positions is None else attended.positions
        if begins is not None:
            query = query - begins
            # the tokens before the call belong to a text that began at 0
            key = key - mx.pad(begins, [(0, 0), (attended.keys.shape[2] - length, 0)])
        at = mx.broadcast_to(mx.minimum(query, farthest), (batch, length))
        near = self.rope(plain, at)
        is_sink = (key < self._sinks)[:, None, :, None]
        zero = mx.zeros((), attended.keys.dtype)
        others = mx.where(is_sink, zero, attended.keys)
        sinks = mx.where(is_sink, attended.keys, zero)
        # twice the dims would halve the scale's square
        queries = mx.concatenate([queries, near], axis=-1) * 2**0.5
        return queries, attended._replace(keys=mx.concatenate([others, sinks], axis=-1))

    def _causal_mask(
        self, attended: Attended, length: int, start: int | mx.array, begins: mx.array | None
    ) -> Mask:
        if attended.positions is None:
            is_short = self._window is None or length <= self._sinks + self._window
            if is_short and begins is None:
                return "causal" if length > 1 else None
            # (1, N): the call's own tokens
            key = mx.arange(length)[None]
        else:
            key = attended.positions
        query = _places(start, length)[..., None]
        key = key[:, None]
        begin = 0 if begins is None else begins[..., None]
        mask = (key >= begin) & (key <= query)
        if self._window is not None:
            mask = mask & ((query - key < self._window) | (key < begin + self._sinks))
        return mask[:, None]

    def _full_mask(self, length: int, counts: mx.array | None, begins: mx.array | None) -> Mask:
        mask: mx.array | None = None
        if self._window is not None:
            token = mx.arange(length)
            mask = mx.abs(token[:, None] - token) < self._window
        if counts is not None:
            is_real = mx.arange(length) < counts[:, None, None, None]
            mask = is_real if mask is None else mask & is_real
        if begins is not None:
            is_same = (begins[:, :, None] == begins[:, None])[:, None]
            mask = is_same if mask is None else mask & is_same
        return mask


def _places(start: int | mx.array, length: int) -> mx.array:
    """Positions of tokens in their row, `(1, L)` or `(B, L)`."""
    column = start[:, None] if isinstance(start, mx.array) else start
    return column + mx.arange(length)[None]


def _check_heads(dims: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    check_sizes("GQA", dims=dims, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_optional_sizes("GQA", head_dim=head_dim)
    if head_dim is None and dims % num_heads:
        raise ValueError(
            f"[GQA] 'num_heads' must divide 'dims' unless 'head_dim' is given but got {num_heads} "
            f"for {dims} dims."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"[GQA] 'num_kv_heads' must divide 'num_heads' but got {num_kv_heads} for {num_heads}."
        )

"""Softmax attention of a sequence to itself, which a family of mixers shares."""

from copy import copy
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..ops import attention
from ..ops.attention import Mask
from .arguments import check_sequences
from .attention_call import SelfAttentionState, attend_call
from .attention_options import AttentionNorms, KeyValueCache, check_heads
from .context import Context
from .heads import split_heads
from .key_value_kind import KeyValueKind
from .linear_factory import Linears, factory_of
from .padding import RealTokens, read_without_padding
from .partition import QUERIES_KEYS_VALUES, Group, Partition
from .position_bias import PositionBias
from .projection import project
from .quantized_array import Quantization
from .rope import RoPE
from .sequence_attention import Heads
from .state_kind import StateKind, StatesByPosition
from .token_mixer import TokenMixer


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

"""Softmax attention of a sequence to itself, which a family of mixers shares."""

from copy import copy
from typing import Any, ClassVar, Self

import mlx.core as mx

from ...ops.attention import Mask
from ...ops.attention import operation as attention_operation
from ...ops.attention_step import without_gates
from ..arguments import check_sequences, check_sizes
from ..context import Context
from ..dense import Linear
from ..fusing import beside
from ..linear import merge_heads, split_heads
from ..mixer import QUERIES_KEYS_VALUES, Group, Linears, Partition, StateKind
from ..norms import RMSNorm
from ..quantization import GROUP_SIZES, Quantization
from .key_values import KeyValueKind, KeyValueState, extend
from .options import AttentionNorms, KeyValueCache
from .positions import PositionBias, RoPE
from .seen import see
from .served import SelfAttentionState as SelfAttentionState
from .served import ServedAttention


class SelfAttention(ServedAttention):
    r"""Attention whose arguments specify projections, heads, positions, window and state.

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
        cache: Which tokens are seen, and how their keys and values are stored.

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
        linear: Linears = Linear,
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
        _check_parts(type(self).__name__, rope, position_bias, norms, cache)
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
            self.query_norm = RMSNorm(head_dim, eps=norms.qk_eps)
            self.key_norm = RMSNorm(head_dim, eps=norms.qk_eps)
        if norms.output_eps is not None:
            self.output_norm = RMSNorm(num_heads * head_dim, eps=norms.output_eps)

    def _check_groups(self, quantization: Quantization) -> None:
        """Refuses groups that do not divide the dims of a head, with `ValueError`."""
        if self.head_dim % quantization.group_size == 0:
            return
        fitting = [str(size) for size in GROUP_SIZES if self.head_dim % size == 0]
        hint = f"Use {' or '.join(fitting)}." if fitting else "Keep keys and values exact."
        raise ValueError(
            f"[{self._name}] 'group_size' of the quantization must divide 'head_dim' but got "
            f"{quantization.group_size} for {self.head_dim}. {hint}"
        )

    def take_part(self, group: Group) -> None:
        if "position_bias" in self:
            self.position_bias = self.position_bias.part(group)

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
            ValueError: There is no space beside the sinks, or the groups do not fit the heads.
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
        cached = max(0, context_length - length)
        if self._cache.capacity is not None:
            cached = min(cached, self._cache.capacity)
        if not self.has_plain_weights or "position_bias" in self:
            # no kernel keeps them out of memory
            queries = length
        # keys and values in float32 beside them
        a_key = self.num_heads * queries + 2 * self.num_kv_heads * self.head_dim
        return batch_size * a_key * (cached + length)

    @property
    def state_kind(self) -> StateKind:
        if not self.is_causal:
            return super().state_kind
        heads, dims, cache, rope = self.num_kv_heads, self.head_dim, self._cache, self.get("rope")
        takes_steps = self.has_plain_weights and "position_bias" not in self and cache.step == 1
        if rope is not None:
            is_scaled = self._is_gated and "query_norm" not in self and rope.query_scale != 1.0
            takes_steps &= not (is_scaled or rope.wavelengths is None or cache.sinks)
        return KeyValueKind(heads, dims, cache, takes_steps)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> SelfAttentionState:
        return self.state_kind.blank(batch_size, 0, dtype) if self.is_causal else ()

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: KeyValueState | tuple[()],
        context: Context,
    ) -> tuple[mx.array, KeyValueState | tuple[()]]:
        heads, kv_heads, dtype = self.num_heads, self.num_kv_heads, q.dtype
        q, k, v = split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
        q, *g = mx.split(q, 2, axis=-1) if self._is_gated else (q,)
        if "query_norm" in self:
            q, k = self.query_norm(q), self.key_norm(k)
        seen, unturned = see(state, q.shape[2], context, self._cache), q
        if "rope" in self:
            q, unturned = self.rope.scaled(q), self.rope.scaled(q)
            q, k = self.rope(q, seen.offset), self.rope(k, seen.offset)
        if seen.reading is not None and isinstance(state, KeyValueState):
            window, sinks = self._cache.window, self._cache.sinks
            k, v, state = extend(state, k, v, seen.reading, window, sinks)
            if sinks and "rope" in self:
                q, k = self.near_sinks(unturned, q, k, seen.reading, ("alone",), context)
        bias = self.position_bias(seen.relative) if "position_bias" in self else None
        y = merge_heads(self.weigh(q, k, v, seen.mask, bias)).astype(dtype)
        return y * mx.sigmoid(merge_heads(*g)) if g else y, state

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
            y, _ = plain.attend(
                mx.concatenate([known, values], axis=-1),
                self.init_state(batch, mx.float32),
                Context(),
            )
            parts.append(split_heads(y, self.num_heads))
        return mx.concatenate(parts, axis=-1)[..., :length]


def _check_parts(caller: str, rope: Any, position_bias: Any, norms: Any, cache: Any) -> None:
    """Refuses values of other types, such as `rope=True`.

    Raises:
        TypeError: There is one.
    """
    for name, part, is_sound, such_as in (
        ("rope", rope, rope is None or callable(rope), "RoPE(8) of mlx_mmfree.layers"),
        (
            "position_bias",
            position_bias,
            position_bias is None or isinstance(position_bias, PositionBias),
            "ALiBi(8) of mlx_mmfree.layers.attention.positions",
        ),
        ("norms", norms, isinstance(norms, AttentionNorms), "AttentionNorms(qk_eps=1e-6)"),
        ("cache", cache, isinstance(cache, KeyValueCache), "KeyValueCache(window=128)"),
    ):
        if not is_sound:
            raise TypeError(f"[{caller}] '{name}' must be as {such_as} but got {part!r:.80}.")


def _check_heads(
    caller: str, dims: int, num_heads: int, num_kv_heads: int, head_dim: int | None
) -> None:
    """Refuses heads that a model of these dims cannot have, with `ValueError`."""
    check_sizes(caller, dims=dims, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if head_dim is not None:
        check_sizes(caller, head_dim=head_dim)
    elif dims % num_heads:
        raise ValueError(
            f"[{caller}] 'num_heads' must divide 'dims' unless 'head_dim' is given but got {num_heads} "
            f"for {dims} dims."
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"[{caller}] 'num_kv_heads' must divide 'num_heads' but got {num_kv_heads} for "
            f"{num_heads}."
        )

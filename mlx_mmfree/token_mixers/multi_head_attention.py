"""Multi-head attention (Vaswani et al., arXiv 1706.03762)."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import mlx.core as mx

from ..layers.arguments import check_sequences, check_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.attention.options import KeyValueCache
from ..layers.attention.positions import PositionBias, RoPE
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, one_hot_values, split_heads
from ..layers.mixer import Linears, State, StateKind, factory_of
from ..ops import attention

Memory = mx.array | tuple[mx.array, mx.array]


class MemoryState(NamedTuple):
    """Keys and values of a second sequence, computed once for all calls.

    Attributes:
        keys: `(B, H, M, K)`.
        values: `(B, H, M, K)`.
        valid: Booleans `(B, M)`, `False` where padded.

    Example:
        >>> mixer = MultiHeadAttention(32, num_heads=4)
        >>> y, state = mixer(mx.zeros((1, 5, 32)), memory=mx.zeros((1, 7, 32)))
        >>> state.values.shape, state.valid.shape
        ((1, 4, 7, 8), (1, 7))
    """

    keys: mx.array
    values: mx.array
    valid: mx.array


class MultiHeadAttention(SelfAttention):
    r"""Softmax attention of several heads, of a sequence to itself or to a second one.

    .. math::
        y_t = W_o\,\Big[\sum_{j} \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,h} / \sqrt{K}\big)\,
        v_{j,h}\Big]_{h=1..H}

    Called with a `memory`, keys and values come from all its positions, whatever `is_causal` says,
    and positions of neither sequence count. The state then holds them, and the memory of later calls
    with this state is ignored: it must be the same. Heads with keys in common are `GQA`'s.

    Source: Vaswani et al., arXiv 1706.03762, sec. 3.2.2.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        head_dim: Dims `K` of a head. Default: `dims / num_heads`.
        memory_dims: Dims of the memory, or of what its keys and what its values are made of.
            Other dims than `dims` make attention to a memory alone. Default: `dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias. The paper has none, most of its successors do.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one after the other; no
            memory can be read.
        rope: Rotates queries and keys, made for `head_dim`; `None`: it does not.
        position_bias: Adds a term to the scores by the distance, made for `num_heads`.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.
        cache: Which tokens of its own sequence are seen, and how their keys and values are stored.

    Shape:
        `x` and `y`: `(B, L, D)`; `memory`: `(B, M, S)`, or a pair of `(B, M, S_k)` and `(B, M, S_v)`;
        `memory_valid`: booleans `(B, M)`. Where all of a row's memory is padding, it adds nothing.

    State:
        `KeyValueState`, `()` if not causal; with a memory `MemoryState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, an input has other dims,
            or a memory is given where none can be read.

    Example:
        >>> mixer = MultiHeadAttention(32, num_heads=4, memory_dims=12)
        >>> y, state = mixer(mx.zeros((1, 5, 32)), memory=mx.zeros((1, 7, 12)))
        >>> y.shape, state.keys.shape
        ((1, 5, 32), (1, 4, 7, 8))
    """

    equation: ClassVar[str] = "y = softmax(Q K^T / sqrt(d)) V"
    complexity: ClassVar[str] = "T^2 D"
    paper: ClassVar[str] = "arXiv 1706.03762"
    cross: ClassVar[bool] = True
    memory_states: ClassVar[tuple[type, ...]] = (MemoryState,)

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        head_dim: int | None = None,
        memory_dims: int | tuple[int, int] | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        is_stacked: bool = False,
        rope: RoPE | None = None,
        position_bias: PositionBias | None = None,
        is_causal: bool = True,
        cache: KeyValueCache = KeyValueCache(),  # noqa: B008 (frozen)
    ):
        super().__init__(
            dims,
            num_heads=num_heads,
            head_dim=head_dim,
            linear=linear,
            bias=bias,
            is_stacked=is_stacked,
            rope=rope,
            position_bias=position_bias,
            is_causal=is_causal,
            cache=cache,
        )
        if is_stacked:
            self.cross = False  # type: ignore[misc]
            if memory_dims is not None:
                raise ValueError(
                    "[MultiHeadAttention] 'memory_dims' must be left out with 'is_stacked' but got "
                    f"{memory_dims}."
                )
        given = dims if memory_dims is None else memory_dims
        self._memory_dims = (given, given) if isinstance(given, int) else tuple(given)
        for size in self._memory_dims:
            check_sizes("MultiHeadAttention", memory_dims=size)
        for name, size in zip(("key_proj", "value_proj"), self._memory_dims, strict=True):
            if size != dims:
                make = factory_of(linear, name)
                self[name] = make(size, num_heads * self.head_dim, bias=bias)

    @property
    def state_kind(self) -> StateKind:
        return _MemoryKind(super().state_kind)

    def is_cut(self, x: mx.array, state: State, context: Context) -> bool:
        return super().is_cut(x, state, context) and not isinstance(state, MemoryState)

    def run(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        memory, valid = context.memory, context.valid
        if memory is None and not isinstance(state, MemoryState):
            self._check_sees_itself()
            return super().run(x, state, context, **arguments)
        if not isinstance(state, MemoryState):
            state = self._read_memory(x.shape[0], state, cast(Memory, memory), context.memory_valid)
        queries = split_heads(self["query_proj"](x), self.num_heads)
        seen = state.valid[:, None, None]
        has_any = mx.any(seen, axis=-1, keepdims=True)
        y = attention(
            queries, state.keys, state.values, mx.logical_or(seen, mx.logical_not(has_any))
        )
        y = mx.where(has_any, y, mx.zeros((), y.dtype))
        y = self.finish(merge_heads(y), x.dtype)
        return y if valid is None else mx.where(valid[..., None], y, mx.zeros((), y.dtype)), state

    def mixing_weights(
        self, x: mx.array, *, memory: Memory | None = None, **arguments: Any
    ) -> mx.array:
        if memory is None:
            self._check_sees_itself()
            return super().mixing_weights(x, **arguments)
        check_sequences("MultiHeadAttention", x, self._dims)
        keys = self._read_memory(x.shape[0], None, memory, None).keys.astype(mx.float32)
        queries = split_heads(self["query_proj"](x), self.num_heads).astype(mx.float32)
        return attention(queries, keys, one_hot_values(*keys.shape[:3]))

    def _read_memory(
        self, batch: int, state: State, memory: Memory, valid: mx.array | None
    ) -> MemoryState:
        """The keys and values of a memory that no state holds yet."""
        if not self.cross:
            raise ValueError(
                "[MultiHeadAttention] 'memory' must be left out with 'is_stacked' but was given."
            )
        if state and state.used:
            raise ValueError(
                "[MultiHeadAttention] 'memory' must come with the first call but got a state of "
                f"{state.used} tokens that were read without it."
            )
        made_of = memory if isinstance(memory, tuple) else (memory, memory)
        count = made_of[0].shape[1] if made_of[0].ndim == 3 else 0
        for source, size in zip(made_of, self._memory_dims, strict=True):
            if source.shape != (batch, count, size) or not count:
                raise ValueError(
                    f"[MultiHeadAttention] 'memory' must have shape ({batch}, M, {size}), with a "
                    f"position at least, but got {source.shape}."
                )
        keys, values = (
            split_heads(self[name](source), self.num_heads)
            for name, source in zip(("key_proj", "value_proj"), made_of, strict=True)
        )
        return MemoryState(
            keys, values, mx.ones((batch, count), mx.bool_) if valid is None else valid
        )

    def _check_sees_itself(self) -> None:
        if self._memory_dims != (self._dims, self._dims):
            raise ValueError(
                f"[MultiHeadAttention] 'memory' must be given where 'memory_dims' is not 'dims' but "
                f"they are {self._memory_dims} and {self._dims}."
            )


class _MemoryKind(StateKind):
    """The states of attention to itself, and a `MemoryState`, which no token changes."""

    def __init__(self, own: StateKind):
        self._own = own
        self.takes_steps = own.takes_steps

    @property
    def settings(self) -> str:
        return self._own.settings

    def blank(self, batch_size: int, length: int, dtype: mx.Dtype) -> State:
        return self._own.blank(batch_size, length, dtype)

    @property
    def exact_length(self) -> int | None:
        return self._own.exact_length

    def is_of_batch(self, state: State, length: int) -> bool:
        return not isinstance(state, MemoryState) and self._own.is_of_batch(state, length)

    def counted(self, state: State) -> tuple[mx.array, ...]:
        return () if isinstance(state, MemoryState) else self._own.counted(state)

    def can_rewind(self, state: State, count: int) -> bool:
        return isinstance(state, MemoryState) or self._own.can_rewind(state, count)

    def rewound(self, state: State, count: int) -> State:
        return state if isinstance(state, MemoryState) else self._own.rewound(state, count)

    def fixed(self, state: State, count: int = 1) -> tuple[State, int | None] | None:
        return (state, None) if isinstance(state, MemoryState) else self._own.fixed(state, count)

    def growing(self, state: State, unread: int | None) -> State:
        return state if isinstance(state, MemoryState) else self._own.growing(state, unread)

    def with_tail(self, state: State, slots: int) -> State:
        return self._own.with_tail(state, slots)

    def without_tail(self, state: State, count: int) -> State:
        return self._own.without_tail(state, count)

    def merged(self, states: Sequence[State]) -> State:
        if not any(isinstance(state, MemoryState) for state in states):
            return self._own.merged(states)
        if not all(isinstance(state, MemoryState) for state in states):
            raise ValueError(
                "[MultiHeadAttention] states must all hold a 'memory', or none, to be merged."
            )
        most = max(state.keys.shape[2] for state in states)
        return super().merged([_with_positions(state, most) for state in states])

    def selected(self, state: State, rows: mx.array, length: int) -> State:
        if isinstance(state, MemoryState):
            return super().selected(state, rows, length)
        return self._own.selected(state, rows, length)


def _with_positions(state: MemoryState, count: int) -> MemoryState:
    """The same memory with padding up to so many positions."""
    missing = [(0, 0), (0, count - state.keys.shape[2])]
    keys, values = (
        mx.pad(array, [(0, 0), *missing, (0, 0)]) for array in (state.keys, state.values)
    )
    return MemoryState(keys, values, mx.pad(state.valid, missing))

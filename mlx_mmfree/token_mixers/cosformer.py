"""cosFormer, linear attention that favours near tokens (Qin et al., arXiv 2202.08791)."""

import math
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context, count_on
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer
from ..layers.recurrence import attend_to_all, check_no_starts, weights_of_kernel, with_ones
from ..ops import gated_linear_attention
from ..ops.activations import relu


class CosFormerState(NamedTuple):
    """The state of a causal `CosFormer`.

    Attributes:
        sums: The sums of all features of keys with their values and, as a further column, alone,
            float32 `(B, H, 2K, K + 1)`.
        position: That of the next token of each row, int32 `(B,)`.

    Example:
        >>> y, state = CosFormer(32, num_heads=4)(mx.zeros((2, 5, 32)))
        >>> state.sums.shape, state.position.tolist()
        ((2, 4, 16, 9), [5, 5])
    """

    sums: mx.array
    position: mx.array


class CosFormer(TokenMixer):
    r"""Attention by rectified products of queries and keys, weighted by a cosine of their distance.

    .. math::
        o_t = \frac{\sum_j w_{tj} v_j}{\max(\sum_j w_{tj}, \epsilon)}, \quad
        w_{tj} = \mathrm{relu}(q_t) \cdot \mathrm{relu}(k_j)\,\cos\frac{\pi (t - j)}{2 M}

    and :math:`y_t = W_o o_t`, over `j <= t` if causal and all otherwise. It is linear in the length,
    since the cosine of a difference is a product of two features. `M` is `max_length`, so that a token's
    output stays while a text grows; the released code has the length of each call in its place. Where a
    text that is read in chunks has grown beyond it, results are NaN. With a `memory`, keys and values
    are of all its positions, counted like the positions of `x`, and the sums stay as they are.

    Source: Qin et al., arXiv 2202.08791.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`, of `K` dims.
        max_length: `M`, the longest text.
        eps: :math:`\epsilon`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        is_causal: Each token sees the ones before it and itself; otherwise all of the sequence.

    Shape:
        `x` and `y`: `(B, L, D)`; `memory`: `(B, N, D)`.

    State:
        `CosFormerState`; `()` if not causal.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = CosFormer(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.sums.shape
        ((1, 5, 32), (1, 4, 16, 9))
    """

    equation: ClassVar[str] = "w_tj = relu(q_t) relu(k_j) cos(pi (t - j) / 2M), y = w v / sum w"
    complexity: ClassVar[str] = "2 T D^2 / H"
    paper: ClassVar[str] = "arXiv 2202.08791"
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    cross: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    length_bound: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    of_memory: ClassVar[tuple[str, ...]] = ("key_proj", "value_proj")
    partition = Partition(QUERIES_KEYS_VALUES)

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        max_length: int = 2048,
        eps: float = 1e-6,
        linear: Linears = Linear,
        bias: bool = False,
        is_causal: bool = True,
    ):
        super().__init__()
        check_sizes("CosFormer", max_length=max_length)
        self._head_dim = dims_of_a_head("CosFormer", dims, num_heads)
        self._dims = dims
        self.num_heads = num_heads
        self.max_length = max_length
        self._eps = eps
        self.is_causal = is_causal
        inner = {name: [dims] for name in ("query_proj", "key_proj", "value_proj")}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> CosFormerState | tuple[()]:
        if not self.is_causal:
            return ()
        shape = (batch_size, self.num_heads, 2 * self._head_dim, self._head_dim + 1)
        return CosFormerState(mx.zeros(shape), mx.zeros((batch_size,), mx.int32))

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        state: CosFormerState | tuple[()],
        context: Context,
    ) -> tuple[mx.array, CosFormerState | tuple[()]]:
        self._check_length("x", q)
        memory, none = context.memory, mx.zeros((q.shape[0],), mx.int32)
        before = state.position if isinstance(state, CosFormerState) else none
        positions, position = count_on(before, q.shape[1], context)
        key_positions = positions
        if memory is not None:
            self._check_length("memory", memory)
            key_positions, _ = count_on(none, memory.shape[1], Context(context.memory_valid))
        q, k = self._features(q, positions), self._features(k, key_positions)
        v = with_ones(split_heads(v, self.num_heads).astype(mx.float32))
        if isinstance(state, CosFormerState) and memory is None:
            o, sums = gated_linear_attention(
                q, k, v, None, state.sums, valid=context.valid, starts=context.starts
            )
            state = CosFormerState(sums, position)
        else:
            check_no_starts("CosFormer", context.starts)
            seen = context.valid if memory is None else context.memory_valid
            o = attend_to_all(q, k, v, seen)
            state = (
                state._replace(position=position) if isinstance(state, CosFormerState) else state
            )
        o = o[..., :-1] / mx.maximum(o[..., -1:], self._eps)
        return merge_heads(
            mx.where((positions < self.max_length)[:, None, :, None], o, mx.nan)
        ), state

    def mixing_weights(
        self, x: mx.array, *, memory: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("CosFormer", x, self._dims)
        q, k, _ = self.apart(self.project_both(x, x if memory is None else memory))
        q, k = (self._features(part, mx.arange(part.shape[1])[None]) for part in (q, k))
        weights = weights_of_kernel(q, k, is_causal=self.is_causal and memory is None)
        return weights / mx.maximum(weights.sum(axis=-1, keepdims=True), self._eps)

    def _features(self, x: mx.array, positions: mx.array) -> mx.array:
        """Rectified projections times sine and cosine of their positions, `(B, H, L, 2K)`."""
        heads = split_heads(relu(x.astype(mx.float32)), self.num_heads)
        angles = (positions * (math.pi / 2 / self.max_length))[:, None, :, None]
        return mx.concatenate([heads * mx.sin(angles), heads * mx.cos(angles)], axis=-1)

    def _check_length(self, name: str, x: mx.array) -> None:
        if x.shape[1] > self.max_length:
            raise ValueError(
                f"[CosFormer] '{name}' must have at most 'max_length' = {self.max_length} positions but "
                f"got {x.shape[1]}. Make the mixer with a larger 'max_length'."
            )

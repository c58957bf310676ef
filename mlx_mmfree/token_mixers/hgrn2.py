"""HGRN2, gated linear recurrence with an expanded state (Qin et al., arXiv 2404.07904)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_sequences, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.mixer import Linears, Partition, TokenMixer
from ..layers.norms import RMSNorm
from ..layers.recurrence import bounded_gate, weights_of_recurrence
from ..ops import gated_linear_attention
from ..ops.activations import silu


class HGRN2State(NamedTuple):
    """The state of an `HGRN2`.

    Attributes:
        memory: The recurrent state, float32 `(B, H, K, V)`.

    Example:
        >>> y, state = HGRN2(32)(mx.zeros((2, 5, 32)))
        >>> state.memory.shape
        (2, 8, 4, 4)
    """

    memory: mx.array


class HGRN2(TokenMixer):
    r"""Gated recurrence whose state is a matrix for each head, and whose keys are tied to the gates.

    .. math::
        f_t &= b + (1 - b) \odot \sigma(W_f x_t), \quad q_t = \mathrm{silu}(W_q x_t) \\
        S_t &= \mathrm{diag}(f_t)\,S_{t-1} + (1 - f_t)^\top W_i x_t \\
        y_t &= W_o\,\mathrm{RMSNorm}(q_t\,S_t\,s)

    for each head, with one norm over all heads. The lower bound `b` is an argument of the call, since a
    model shares one table between its layers. The scale `s` is the released one; the paper has
    none, which the norm hides but for its epsilon.

    Source: Qin et al., arXiv 2404.07904.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`. Released models have `dims / 128`.
        head_dim: Dims `K` of a gate and a query, by which the state is expanded. Default:
            `dims / num_heads`, which is also the size `V` of a value.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.
        scale: :math:`s`. Default: :math:`K^{-1/2}`; 1 is the paper's.

    Shape:
        `x` and `y`: `(B, L, D)`; `lower_bound`: `(H * K,)`.

    State:
        `HGRN2State`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = HGRN2(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 8, 8))
    """

    equation: ClassVar[str] = "S_t = diag(f_t) S_(t-1) + (1 - f_t)^T v_t, y_t = W norm(q_t S_t)"
    complexity: ClassVar[str] = "T D K"
    paper: ClassVar[str] = "arXiv 2404.07904"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    before_output: ClassVar[str] = "output_norm"
    partition = Partition({"query_proj": 1, "forget_proj": 1, "input_proj": 1}, norm="output_norm")

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        head_dim: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
        scale: float | None = None,
    ):
        super().__init__()
        self._value_dim = dims_of_a_head("HGRN2", dims, num_heads)
        head_dim = dims_of_a_head("HGRN2", dims, num_heads, head_dim)
        self._dims = dims
        self._head_dim = head_dim
        self.num_heads = num_heads
        self._scale = head_dim**-0.5 if scale is None else scale
        keys = num_heads * head_dim
        inner = {"query_proj": [keys], "forget_proj": [keys], "input_proj": [dims]}
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(dims, dims, linear, bias=bias)
        self.output_norm = RMSNorm(dims, eps=norm_eps)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> HGRN2State:
        shape = (batch_size, self.num_heads, self._head_dim, self._value_dim)
        return HGRN2State(mx.zeros(shape))

    def mix(
        self,
        q: mx.array,
        f: mx.array,
        v: mx.array,
        state: HGRN2State,
        context: Context,
        *,
        lower_bound: mx.array | None = None,
    ) -> tuple[mx.array, HGRN2State]:
        q, f, k = self._heads(q, f, lower_bound)
        v = split_heads(v, self.num_heads).astype(mx.float32)
        o, memory = gated_linear_attention(
            q, k, v, f, state.memory, valid=context.valid, starts=context.starts
        )
        return merge_heads(o), HGRN2State(memory)

    def _heads(
        self, q: mx.array, f: mx.array, lower_bound: mx.array | None
    ) -> tuple[mx.array, ...]:
        """Queries, gates, and what is not forgotten by them, in heads."""
        q = silu(q.astype(mx.float32)) * self._scale
        gates = bounded_gate(f, lower_bound)
        return tuple(split_heads(part, self.num_heads) for part in (q, *gates))

    def mixing_weights(
        self, x: mx.array, *, lower_bound: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("HGRN2", x, self._dims)
        q, f, _ = self.apart(self.project(x))
        q, f, k = self._heads(q, f, lower_bound)
        return weights_of_recurrence(q, k, f)

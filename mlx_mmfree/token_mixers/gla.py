"""Gated linear attention (Yang et al., arXiv 2312.06635)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.linear import split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer, factory_of
from ..layers.norms import RMSNorm
from ..layers.recurrence import gated_output, weights_of_recurrence
from ..ops import gated_linear_attention
from ..ops.activations import log_sigmoid


class GLAState(NamedTuple):
    """The state of a `GLA`.

    Attributes:
        memory: The recurrent state, float32 `(B, H, K, V)`.

    Example:
        >>> y, state = GLA(32)(mx.zeros((2, 5, 32)))
        >>> state.memory.shape
        (2, 4, 4, 8)
    """

    memory: mx.array


class GLA(TokenMixer):
    r"""Linear attention that forgets, each key channel by a gate of its own.

    .. math::
        f_t &= \sigma(W_2 W_1 x_t + b)^{1/\tau} \\
        S_t &= \mathrm{diag}(f_t)\,S_{t-1} + (W_k x_t)^\top W_v x_t \\
        y_t &= W_o\,(\mathrm{RMSNorm}(W_q x_t\,S_t\,K^{-1/2}) \odot \mathrm{silu}(W_g x_t))

    for each head, with a norm of each head whose weight all share. :math:`W_1` maps to few dims, and the
    root keeps gates near 1.

    Source: Yang et al., arXiv 2312.06635.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        key_dims: Dims of all queries, keys and gates, `H * K`. Default: `dims / 2`.
        value_dims: Dims of all values, `H * V`. Default: `dims`.
        gate_rank: Dims that :math:`W_1` maps to.
        gate_root: :math:`\tau`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`W_1` is `forget_down_proj`,
            :math:`W_2` is `forget_proj`.
        bias: Whether the projections but the gate's, whose last one always has one, have a bias.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `GLAState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = GLA(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 4, 8))
    """

    equation: ClassVar[str] = (
        "S_t = diag(f_t) S_(t-1) + k_t^T v_t, y_t = W (norm(q_t S_t) silu(g_t))"
    )
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2312.06635"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    partition = Partition({**QUERIES_KEYS_VALUES, "gate_proj": 1, "forget_proj": 1})

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        key_dims: int | None = None,
        value_dims: int | None = None,
        gate_rank: int = 16,
        gate_root: float = 16.0,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes("GLA", dims=dims, gate_rank=gate_rank)
        check_optional_sizes("GLA", key_dims=key_dims, value_dims=value_dims)
        key_dims = dims // 2 if key_dims is None else key_dims
        value_dims = dims if value_dims is None else value_dims
        self._key_dim = dims_of_a_head("GLA", key_dims, num_heads)
        self._value_dim = dims_of_a_head("GLA", value_dims, num_heads)
        self._dims = dims
        self.num_heads = num_heads
        self._gate_root = gate_root
        inner = {
            "query_proj": [key_dims],
            "key_proj": [key_dims],
            "value_proj": [value_dims],
            "gate_proj": [value_dims],
        }
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_projections(dims, {"forget_down_proj": [gate_rank]}, linear)
        self.forget_proj = factory_of(linear, "forget_proj")(gate_rank, key_dims, bias=True)
        self.make_output(value_dims, dims, linear, bias=bias)
        self.output_norm = RMSNorm(self._value_dim, eps=norm_eps)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> GLAState:
        return GLAState(mx.zeros((batch_size, self.num_heads, self._key_dim, self._value_dim)))

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        f: mx.array,
        state: GLAState,
        context: Context,
    ) -> tuple[mx.array, GLAState]:
        q, k, f = self._heads(q, k, f)
        v = split_heads(v, self.num_heads).astype(mx.float32)
        o, memory = gated_linear_attention(
            q, k, v, f, state.memory, valid=context.valid, starts=context.starts
        )
        return gated_output(self["output_norm"], o.swapaxes(1, 2), g), GLAState(memory)

    def _heads(self, q: mx.array, k: mx.array, f: mx.array) -> tuple[mx.array, ...]:
        """Queries, keys and forget gates in heads."""
        f = mx.exp(log_sigmoid(self.forget_proj(f).astype(mx.float32)) / self._gate_root)
        q, k, f = (split_heads(part, self.num_heads) for part in (q, k, f))
        return q.astype(mx.float32) * self._key_dim**-0.5, k, f

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("GLA", x, self._dims)
        q, k, _, _, f = self.apart(self.project(x))
        return weights_of_recurrence(*self._heads(q, k, f))

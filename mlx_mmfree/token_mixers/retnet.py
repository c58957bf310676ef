"""Multi-scale retention (Sun et al., arXiv 2307.08621)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import numpy as np

from ..layers import RoPE
from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes, dims_of_a_head
from ..layers.context import Context, count_on
from ..layers.dense import Linear
from ..layers.linear import split_heads
from ..layers.mixer import QUERIES_KEYS_VALUES, Linears, Partition, TokenMixer
from ..layers.norms import RMSNorm
from ..layers.recurrence import gated_output, weights_of_recurrence
from ..ops import gated_linear_attention


class RetNetState(NamedTuple):
    """The state of a `RetNet`.

    Attributes:
        memory: The recurrent state, float32 `(B, H, K, V)`.
        position: That of the next token of each row, int32 `(B,)`.

    Example:
        >>> y, state = RetNet(32)(mx.zeros((2, 5, 32)))
        >>> state.memory.shape
        (2, 8, 4, 8)
    """

    memory: mx.array
    position: mx.array


class RetNet(TokenMixer):
    r"""Linear attention that forgets at a constant rate, another one for each head.

    .. math::
        S_t &= \gamma_h\,S_{t-1} + R_t(W_k x_t)^\top W_v x_t, \quad \gamma_h = 1 - 2^{-5-h} \\
        y_t &= W_o\,(\mathrm{RMSNorm}(R_t(W_q x_t)\,S_t\,K^{-1/2}) \odot \mathrm{silu}(W_g x_t))

    for each head `h` from 0, with rotated queries and keys and a norm of each head whose weight all
    share. This is how flash-linear-attention defines it, whose checkpoints are published. The first
    code of the authors rotates neighbours instead of halves (give `rope`), divides by the sum of the
    decays, which the norm undoes but for its epsilon, and norms without a weight.

    Source: Sun et al., arXiv 2307.08621.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        key_dims: Dims of all queries and keys, `H * K`. Default: `dims`.
        value_dims: Dims of all values, `H * V`. Default: `2 * dims`.
        rope: The rotation, made for `K`. Default: `RoPE(K)`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `RetNetState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = RetNet(32, num_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape, state.position.tolist()
        ((1, 5, 32), (1, 4, 8, 16), [5])
    """

    equation: ClassVar[str] = "S_t = gamma S_(t-1) + k_t^T v_t, y_t = W (norm(q_t S_t) silu(g_t))"
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2307.08621"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    partition = Partition({**QUERIES_KEYS_VALUES, "gate_proj": 1}, arrays=("_decay",))

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 8,
        key_dims: int | None = None,
        value_dims: int | None = None,
        rope: RoPE | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes("RetNet", dims=dims)
        check_optional_sizes("RetNet", key_dims=key_dims, value_dims=value_dims)
        key_dims = dims if key_dims is None else key_dims
        value_dims = 2 * dims if value_dims is None else value_dims
        self._key_dim = dims_of_a_head("RetNet", key_dims, num_heads)
        self._value_dim = dims_of_a_head("RetNet", value_dims, num_heads)
        self._dims = dims
        self.num_heads = num_heads
        # rounded once, since a power of it falls by thousands of steps
        self._decay = mx.array((1.0 - 2.0 ** (-5.0 - np.arange(num_heads))).astype(np.float32))
        self.rope = RoPE(self._key_dim) if rope is None else rope
        inner = {
            "query_proj": [key_dims],
            "key_proj": [key_dims],
            "value_proj": [value_dims],
            "gate_proj": [value_dims],
        }
        self.make_projections(dims, inner, linear, bias=bias)
        self.make_output(value_dims, dims, linear, bias=bias)
        self.output_norm = RMSNorm(self._value_dim, eps=norm_eps)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> RetNetState:
        shape = (batch_size, self.num_heads, self._key_dim, self._value_dim)
        return RetNetState(mx.zeros(shape), mx.zeros((batch_size,), mx.int32))

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        state: RetNetState,
        context: Context,
    ) -> tuple[mx.array, RetNetState]:
        positions, position = count_on(state.position, q.shape[1], context)
        q, k, decay = self._heads(q, k, positions)
        v = split_heads(v, self.num_heads).astype(mx.float32)
        o, memory = gated_linear_attention(
            q, k, v, decay, state.memory, valid=context.valid, starts=context.starts
        )
        return gated_output(self["output_norm"], o.swapaxes(1, 2), g), RetNetState(memory, position)

    def _heads(
        self, q: mx.array, k: mx.array, positions: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Rotated queries and keys `(B, H, L, K)`, and the decay `(B, H, L, 1)`, float32."""
        q, k = (split_heads(part, self.num_heads).astype(mx.float32) for part in (q, k))
        q, k = (self.rope(part, offset=positions) for part in (q * self._key_dim**-0.5, k))
        return q, k, mx.broadcast_to(self["_decay"][:, None, None], (*q.shape[:3], 1))

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("RetNet", x, self._dims)
        q, k, _, _ = self.apart(self.project(x))
        positions = mx.broadcast_to(mx.arange(x.shape[1]), x.shape[:2])
        return weights_of_recurrence(*self._heads(q, k, positions))

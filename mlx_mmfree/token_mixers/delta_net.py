"""DeltaNet, linear attention that replaces what it holds (Yang et al., arXiv 2406.06484)."""

from typing import Any, ClassVar

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sizes, dims_of_a_head
from ..layers.delta_rule import DeltaRuleMixer, DeltaRuleState
from ..layers.dense import Linear
from ..layers.mixer import Linears
from ..layers.recurrence import gated_output
from ..ops import rms_norm


class DeltaNet(DeltaRuleMixer):
    r"""Linear attention whose state forgets what it holds under a key before it writes.

    .. math::
        q_t, k_t &= \mathrm{unit}(\mathrm{silu}(\mathrm{conv}(W_q x)_t)),
        \mathrm{unit}(\mathrm{silu}(\mathrm{conv}(W_k x)_t)), \quad
        v_t = \mathrm{silu}(\mathrm{conv}(W_v x)_t), \quad \beta_t = \sigma(W_b x_t) \\
        S_t &= S_{t-1} + \beta_t\,k_t\,(v_t - S_{t-1}^\top k_t)^\top \\
        y_t &= W_o\,\mathrm{RMSNorm}(K^{-1/2} S_t^\top q_t)

    for each head, with a norm of each head whose weight all share. Vectors are brought to length 1, and
    the convolutions are short and causal.

    Source: Yang et al., arXiv 2406.06484, as in flash-linear-attention.

    Args:
        dims: Model dims `D`.
        num_heads: Heads `H`.
        key_dims: Dims of all queries and keys, `H * K`. Default: `dims`.
        value_dims: Dims of all values, `H * V`. Default: `dims`.
        conv_size: Taps of the convolutions.
        use_gate: Whether the output is multiplied by :math:`\mathrm{silu}(W_g x_t)`.
        allow_negative: :math:`\beta_t` is twice as large, so that the state may change its sign.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `DeltaRuleState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit the dims, or an input has other
            dims.

    Example:
        >>> y, state = DeltaNet(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 8, 8))
    """

    equation: ClassVar[str] = (
        "S_t = S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t)^T, y_t = W norm(S_t^T q_t)"
    )
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2406.06484"

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        key_dims: int | None = None,
        value_dims: int | None = None,
        conv_size: int = 4,
        use_gate: bool = False,
        allow_negative: bool = False,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        check_sizes("DeltaNet", dims=dims)
        check_optional_sizes("DeltaNet", key_dims=key_dims, value_dims=value_dims)
        key_dims = dims if key_dims is None else key_dims
        value_dims = dims if value_dims is None else value_dims
        super().__init__(
            dims,
            num_heads=num_heads,
            num_value_heads=num_heads,
            key_dim=dims_of_a_head("DeltaNet", key_dims, num_heads),
            value_dim=dims_of_a_head("DeltaNet", value_dims, num_heads),
            conv_size=conv_size,
            max_beta=2 if allow_negative else 1,
            linear=linear,
            bias=bias,
            norm_eps=norm_eps,
        )
        if use_gate:
            self.make_projections(dims, {"gate_proj": [value_dims]}, linear, bias=bias)

    def mix(
        self, q: mx.array, k: mx.array, v: mx.array, b: mx.array, *others: Any
    ) -> tuple[mx.array, DeltaRuleState]:
        *g, state, context = others
        o, state = self.attend(q, k, v, self.steps(b), state, context)
        norm = self["output_norm"]
        if g:
            return gated_output(norm, o, *g), state
        return mx.flatten(rms_norm(o, norm["weight"], eps=norm.eps), 2), state

    def steps(self, b: mx.array, *others: mx.array) -> tuple[mx.array, None]:
        return self.beta(b), None

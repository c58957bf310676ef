"""Kimi delta attention, with a gate for each key channel (Kimi Team, arXiv 2510.26692)."""

from typing import ClassVar

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.delta_rule import DeltaRuleMixer, DeltaRuleState, fresh_decay_log, fresh_step_bias
from ..layers.dense import Linear
from ..layers.linear import split_heads
from ..layers.mixer import Linears, factory_of
from ..ops import rms_norm
from ..ops.gated_delta_net import softplus


class KDA(DeltaRuleMixer):
    r"""DeltaNet whose state decays, each key channel by a gate of its own.

    .. math::
        f_t &= \exp(-e^{A}\,\mathrm{softplus}(W_2 W_1 x_t + d)), \quad \beta_t = \sigma(W_b x_t) \\
        S_t &= \mathrm{diag}(f_t) S_{t-1} + \beta_t\,k_t\,(v_t - S_{t-1}^\top (f_t \odot k_t))^\top \\
        y_t &= W_o\,(\mathrm{RMSNorm}(K^{-1/2} S_t^\top q_t) \odot \sigma(W_4 W_3 x_t))

    for each head of values, with queries, keys and values as in `DeltaNet`. :math:`W_1` and :math:`W_3`
    map to few dims. With a lower bound `l`, :math:`f_t = \exp(l\,\sigma(e^{A}(W_2 W_1 x_t + d)))`.

    Source: Kimi Team, arXiv 2510.26692, as in flash-linear-attention.

    Args:
        dims: Model dims `D`.
        num_heads: Heads of queries and keys.
        num_value_heads: Heads of values `H`, a multiple. Default: as many.
        head_dim: Dims `K` of a key. Default: `dims / num_heads`.
        value_head_dim: Dims `V` of a value. Default: `head_dim`.
        rank: Dims that :math:`W_1` and :math:`W_3` map to. Default: `V`.
        conv_size: Taps of the convolutions.
        lower_bound: The least logarithm of a gate, below 0; `None`: there is none.
        allow_negative: :math:`\beta_t` is twice as large, so that the state may change its sign.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`W_1` to :math:`W_4` are
            `decay_down_proj`, `decay_proj`, `gate_down_proj` and `gate_proj`.
        bias: Whether the projections but those four have a bias.
        gate_bias: Whether :math:`W_4` has one.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `DeltaRuleState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit, the bound is not below 0, or an input
            has other dims.

    Example:
        >>> y, state = KDA(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 8, 8))
    """

    equation: ClassVar[str] = (
        "S_t = diag(f_t) S_(t-1) + b_t k_t (v_t - S_(t-1)^T (f_t k_t))^T, "
        "y_t = W (norm(S_t^T q_t) sigmoid(g_t))"
    )
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2510.26692"

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        num_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        rank: int | None = None,
        conv_size: int = 4,
        lower_bound: float | None = None,
        allow_negative: bool = False,
        linear: Linears = Linear,
        bias: bool = False,
        gate_bias: bool = True,
        norm_eps: float = 1e-5,
    ):
        head_dim = dims_of_a_head("KDA", dims, num_heads, head_dim)
        check_optional_sizes(
            "KDA", num_value_heads=num_value_heads, value_head_dim=value_head_dim, rank=rank
        )
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"[KDA] 'lower_bound' must be below 0 but got {lower_bound}.")
        heads = num_heads if num_value_heads is None else num_value_heads
        value_dim = head_dim if value_head_dim is None else value_head_dim
        super().__init__(
            dims,
            num_heads=num_heads,
            num_value_heads=heads,
            key_dim=head_dim,
            value_dim=value_dim,
            conv_size=conv_size,
            max_beta=2 if allow_negative else 1,
            linear=linear,
            bias=bias,
            norm_eps=norm_eps,
        )
        rank = value_dim if rank is None else rank
        self._lower_bound = lower_bound
        gates = {"decay": heads * head_dim, "gate": heads * value_dim}
        for name, width in gates.items():
            self.make_projections(dims, {f"{name}_down_proj": [rank]}, linear)
            has_bias = name == "gate" and gate_bias
            self[f"{name}_proj"] = factory_of(linear, f"{name}_proj")(rank, width, bias=has_bias)
        self.decay_log = fresh_decay_log(heads)
        self.step_bias = fresh_step_bias(heads * head_dim)

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        b: mx.array,
        a: mx.array,
        g: mx.array,
        state: DeltaRuleState,
        context: Context,
    ) -> tuple[mx.array, DeltaRuleState]:
        o, state = self.attend(q, k, v, self.steps(b, a), state, context)
        norm = self["output_norm"]
        g = mx.unflatten(self.gate_proj(g).astype(mx.float32), -1, o.shape[2:])
        return mx.flatten(rms_norm(o, norm["weight"], eps=norm.eps) * mx.sigmoid(g), 2), state

    def steps(self, b: mx.array, a: mx.array, *others: mx.array) -> tuple[mx.array, mx.array]:
        steps = self.decay_proj(a).astype(mx.float32) + self.step_bias.astype(mx.float32)
        steps = split_heads(steps, self.num_heads)
        return self.beta(b), mx.exp(log_gates(steps, self.decay_log, self._lower_bound))


def log_gates(steps: mx.array, decay_log: mx.array, lower_bound: float | None) -> mx.array:
    """The logarithm of :math:`f_t`, from :math:`W_2 W_1 x_t + d`, `(B, H, L, K)`, and `A`, `(H,)`."""
    rates = mx.exp(decay_log.astype(mx.float32)).reshape(-1, 1, 1)
    if lower_bound is None:
        return -rates * softplus(steps)
    return lower_bound * mx.sigmoid(rates * steps)

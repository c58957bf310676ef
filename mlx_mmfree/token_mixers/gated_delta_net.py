"""Gated DeltaNet, which forgets by a gate and by keys (Yang et al., arXiv 2412.06464)."""

from typing import ClassVar

import mlx.core as mx

from ..layers import delta_rule
from ..layers.arguments import check_optional_sizes, dims_of_a_head
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.fusing import Parts, columns
from ..layers.mixer import Linears
from ..layers.recurrence import gated_output
from ..ops.gated_delta_net import delta_rule_inputs, delta_rule_output, head_gates
from ..ops.gated_delta_rule import led_by_delta_rule


class GatedDeltaNet(delta_rule.DeltaRuleMixer):
    r"""DeltaNet whose state decays, by one gate for each head.

    .. math::
        f_t &= \exp(-e^{A}\,\mathrm{softplus}(W_a x_t + d)), \quad \beta_t = \sigma(W_b x_t) \\
        S_t &= f_t S_{t-1} + \beta_t\,k_t\,(v_t - f_t S_{t-1}^\top k_t)^\top \\
        y_t &= W_o\,(\mathrm{RMSNorm}(K^{-1/2} S_t^\top q_t) \odot \mathrm{silu}(W_g x_t))

    for each head of values, with queries, keys and values as in `DeltaNet`. Some heads of values may
    share one of queries and keys.

    Source: Yang et al., arXiv 2412.06464, as in flash-linear-attention and of Qwen3-Next.

    Args:
        dims: Model dims `D`.
        num_heads: Heads of queries and keys.
        num_value_heads: Heads of values `H`, a multiple. Default: as many.
        head_dim: Dims `K` of a key. Default: `dims / num_heads`.
        value_head_dim: Dims `V` of a value. Default: `head_dim`.
        conv_size: Taps of the convolutions.
        allow_negative: :math:`\beta_t` is twice as large, so that the state may change its sign.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.
        is_stacked: One projection, `qkv_proj`, gives queries, keys and values one after the other, and
            one convolution, `qkv_conv`, reads them, as in Qwen3.5; the last projection is `out_proj`.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `DeltaRuleState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, the heads do not fit, or an input has other dims.

    Example:
        >>> y, state = GatedDeltaNet(32, num_heads=2, num_value_heads=4)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.memory.shape
        ((1, 5, 32), (1, 4, 16, 16))
    """

    equation: ClassVar[str] = (
        "S_t = f_t S_(t-1) + b_t k_t (v_t - f_t S_(t-1)^T k_t)^T, y_t = W (norm(S_t^T q_t) silu(g_t))"
    )
    complexity: ClassVar[str] = "T D^2 / H"
    paper: ClassVar[str] = "arXiv 2412.06464"
    keeps_float32: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        num_heads: int = 4,
        num_value_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        conv_size: int = 4,
        allow_negative: bool = False,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
        is_stacked: bool = False,
    ):
        head_dim = dims_of_a_head("GatedDeltaNet", dims, num_heads, head_dim)
        check_optional_sizes(
            "GatedDeltaNet", num_value_heads=num_value_heads, value_head_dim=value_head_dim
        )
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
            is_stacked=is_stacked,
        )
        self.make_projections(dims, {"decay_proj": [heads]}, linear, bias=bias)
        self.decay_log = delta_rule.fresh_decay_log(heads)
        self.step_bias = delta_rule.fresh_step_bias(heads)
        self.make_projections(dims, {"gate_proj": [heads * value_dim]}, linear, bias=bias)
        # the narrow ones last
        narrow = ("beta_proj", "decay_proj")
        own = self.projections
        wide = {name: widths for name, widths in own.items() if name not in narrow}
        self.declare({**wide, **{name: own[name] for name in narrow}})

    def mix(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        b: mx.array,
        a: mx.array,
        state: delta_rule.DeltaRuleState,
        context: Context,
    ) -> tuple[mx.array, delta_rule.DeltaRuleState]:
        o, state = self.attend(q, k, v, self.steps(g, b, a), state, context)
        return gated_output(self["output_norm"], o, g), state

    def steps(self, g: mx.array, b: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
        return self.beta(b), head_gates(a, self["decay_log"], self["step_bias"])

    def has_fused(self, context: Context) -> bool:
        return context.valid is None and context.starts is None

    def fused(
        self, parts: Parts, state: delta_rule.DeltaRuleState, context: Context
    ) -> tuple[mx.array, delta_rule.DeltaRuleState]:
        sizes, norm = self._sizes, self["output_norm"]
        width = sizes.channels + sizes.heads * sizes.value_dim
        qkv, _ = columns(parts, 0, sizes.channels)
        gate, first = columns(parts, sizes.channels, width - sizes.channels)
        steps, _ = columns(parts, width, 2 * sizes.heads)
        q, written, v, read, f, last = delta_rule_inputs(
            qkv,
            steps,
            self.taps(),
            state.convolution,
            self["decay_log"],
            self["step_bias"],
            sizes,
        )
        o, memory = led_by_delta_rule(q, written, v, read, f, state.memory)
        y = delta_rule_output(o, gate, norm["weight"], eps=norm.eps, first=first)
        return y, delta_rule.DeltaRuleState(last, memory)

"""HGRN, the hierarchically gated recurrent network (Qin et al., arXiv 2311.04823)."""

from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import Group, Linears, Partition, TokenMixer
from ..layers.norms import RMSNorm, is_rms_norm
from ..layers.recurrence import bounded_gate, gated_recurrence, weights_of_gates
from ..layers.sharded_linear import ShardedRMSNorm
from ..ops import gated_rms_norm
from ..ops.activations import silu


class HGRNState(NamedTuple):
    """The state of an `HGRN`.

    Attributes:
        hidden: The recurrent state, float32 `(B, E)`.

    Example:
        >>> y, state = HGRN(32)(mx.zeros((2, 5, 32)))
        >>> state.hidden.shape
        (2, 32)
    """

    hidden: mx.array


class HGRN(TokenMixer):
    r"""Elementwise gated recurrence whose state is normed and gated.

    .. math::
        f_t &= b + (1 - b) \odot \sigma(W_f x_t) \\
        h_t &= f_t \odot h_{t-1} + (1 - f_t) \odot \mathrm{silu}(W_i x_t) \\
        y_t &= W_o\,(\mathrm{RMSNorm}(h_t) \odot \mathrm{silu}(W_g x_t))

    This is the real-valued variant of flash-linear-attention, of which checkpoints are published; the
    recurrence of the paper is complex. `MLGRU` norms the gate and not the state, so that their weights
    are not interchangeable. The lower bound `b` is an argument of the call, since a model shares one
    table between its layers.

    Source: Qin et al., arXiv 2311.04823.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width `E` of the recurrence. Default: `dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of the norm.

    Shape:
        `x` and `y`: `(B, L, D)`; `lower_bound`: `(E,)`.

    State:
        `HGRNState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> y, state = HGRN(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.hidden.shape
        ((1, 5, 32), (1, 32))
    """

    equation: ClassVar[str] = (
        "h_t = f_t h_(t-1) + (1 - f_t) silu(c_t), y_t = W (norm(h_t) silu(g_t))"
    )
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "arXiv 2311.04823"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    weighs_channels: ClassVar[bool] = True
    partition = Partition(
        {"input_proj": 1, "forget_proj": 1, "gate_proj": 1},
        counts=("_hidden_dims",),
    )

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        check_sizes("HGRN", dims=dims)
        check_optional_sizes("HGRN", hidden_dims=hidden_dims)
        hidden_dims = dims if hidden_dims is None else hidden_dims
        self._dims = dims
        self._hidden_dims = hidden_dims
        gates = {name: [hidden_dims] for name in ("input_proj", "forget_proj", "gate_proj")}
        self.make_projections(dims, gates, linear, bias=bias)
        self.make_output(hidden_dims, dims, linear, bias=bias)
        self.output_norm = RMSNorm(hidden_dims, eps=norm_eps)

    def take_part(self, group: Group) -> None:
        self.output_norm = ShardedRMSNorm(self.output_norm, group)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> HGRNState:
        return HGRNState(mx.zeros((batch_size, self._hidden_dims)))

    def mix(
        self,
        i: mx.array,
        f: mx.array,
        g: mx.array,
        state: HGRNState,
        context: Context,
        *,
        lower_bound: mx.array | None = None,
    ) -> tuple[mx.array, HGRNState]:
        h, last = gated_recurrence(i, f, state.hidden, context, lower_bound)
        norm = self["output_norm"]
        if is_rms_norm(norm):
            return gated_rms_norm(h, g, norm["weight"], eps=norm.eps), HGRNState(last)
        return norm(h) * silu(g.astype(mx.float32)), HGRNState(last)

    def mixing_weights(
        self, x: mx.array, *, lower_bound: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("HGRN", x, self._dims)
        return weights_of_gates(*bounded_gate(self["forget_proj"](x), lower_bound))

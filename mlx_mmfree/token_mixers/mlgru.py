"""MLGRU, the MatMul-free gated recurrent unit (Zhu et al., arXiv 2406.02528)."""

from typing import Any, ClassVar, Literal, NamedTuple

import mlx.core as mx

from ..layers import ShortConvolution
from ..layers.arguments import check_counts, check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.fusing import Parts, beside
from ..layers.mixer import Group, Linears, Partition, TokenMixer, part_of
from ..layers.norms import RMSNorm, is_rms_norm
from ..layers.recurrence import bounded_gate, gated_recurrence, weights_of_gates
from ..layers.sharded_linear import ShardedRMSNorm
from ..ops import mlgru_step
from ..ops.activations import silu

Stacking = Literal["none", "recurrence", "all"]
_STACKINGS: dict[Stacking, dict[str, int]] = {
    "none": {"input_proj": 1, "forget_proj": 1, "gate_proj": 1},
    "recurrence": {"recurrence_proj": 2, "gate_proj": 1},
    "all": {"gates_proj": 3},
}
"""The projections of the input, and how many of its gates each gives."""


class MLGRUState(NamedTuple):
    """The state of an `MLGRU`.

    Attributes:
        hidden: The recurrent state, float32 `(B, E)`.
        convolutions: The last inputs of each short convolution, `(B, K - 1, ...)`.

    Example:
        >>> y, state = MLGRU(32)(mx.zeros((2, 5, 32)))
        >>> state.hidden.shape
        (2, 32)
    """

    hidden: mx.array
    convolutions: tuple[mx.array, ...] = ()


class MLGRU(TokenMixer):
    r"""Elementwise gated recurrence with data-dependent gates.

    .. math::
        f_t &= b + (1 - b) \odot \sigma(W_f x_t) \\
        i_t &= \mathrm{silu}(W_i x_t) \odot (1 - f_t) \\
        h_t &= f_t \odot h_{t-1} + i_t \\
        y_t &= W_o\,(\mathrm{RMSNorm}(W_g x_t) \odot \mathrm{silu}(h_t))

    This is the released variant: the norm lies on the gate projection and the swish on the state. In the
    paper, :math:`y_t = W_o\,(\sigma(W_g x_t) \odot h_t)`. The lower bound `b` is an argument of
    the call, since a model shares one table between its layers.

    Source: Zhu et al., arXiv 2406.02528, sec. 3.3.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width `E` of the recurrence. Default: `dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=False)`; or a mapping
            from the names of the projections to what makes each.
        bias: Whether the projections have a bias.
        stacking: Which projections of the input are one matrix; with ternary weights they then share
            one scale. "recurrence" stacks input and forget gate as `recurrence_proj`, "all" these and
            the output gate as `gates_proj`, as Keras-MML does; its "fully" and "partially" matmul-free
            formats are these two with "sigmoid".
        norm_eps: Epsilon of the gate's norm.
        output_gate: "norm" for the released variant, "sigmoid" for the paper's.
        conv_size: Taps of short convolutions; 0 means none.
        share_conv: One convolution of the input for all gates, instead of one each after the input
            and the forget projection.

    Shape:
        `x` and `y`: `(B, L, D)`; `lower_bound`: `(E,)`.

    State:
        `MLGRUState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, an input has other dims, or a word is unknown.

    Example:
        >>> y, state = MLGRU(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.hidden.shape
        ((1, 5, 32), (1, 32))
    """

    equation: ClassVar[str] = "h_t = f_t * h_{t-1} + (1 - f_t) * silu(W_i x_t)"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "arXiv 2406.02528"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    weighs_channels: ClassVar[bool] = True
    partition = Partition(
        {"input_proj": 1, "forget_proj": 1, "gate_proj": 1, "recurrence_proj": 2, "gates_proj": 3},
        counts=("_hidden_dims",),
    )

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Linears = Linear,
        bias: bool = False,
        stacking: Stacking = "none",
        norm_eps: float = 1e-6,
        output_gate: Literal["norm", "sigmoid"] = "norm",
        conv_size: int = 0,
        share_conv: bool = True,
    ):
        super().__init__()
        hidden_dims = dims if hidden_dims is None else hidden_dims
        check_sizes("MLGRU", dims=dims, hidden_dims=hidden_dims)
        check_counts("MLGRU", conv_size=conv_size)
        if output_gate not in ("norm", "sigmoid"):
            raise ValueError(
                f"[MLGRU] 'output_gate' must be 'norm' or 'sigmoid' but got {output_gate!r:.80}."
            )
        if stacking not in tuple(_STACKINGS):
            raise ValueError(
                f"[MLGRU] 'stacking' must be one of {', '.join(map(repr, _STACKINGS))} but got "
                f"{stacking!r:.80}."
            )
        self._dims = dims
        self._hidden_dims = hidden_dims
        gates = {name: [hidden_dims] * count for name, count in _STACKINGS[stacking].items()}
        self.make_projections(dims, gates, linear, bias=bias)
        self.make_output(hidden_dims, dims, linear, bias=bias)
        if output_gate == "norm":
            self.gate_norm = RMSNorm(hidden_dims, eps=norm_eps)
        self.prepares = bool(conv_size and share_conv)
        if self.prepares:
            self.shared_conv = ShortConvolution(dims, conv_size)
        elif conv_size:
            self.input_conv = ShortConvolution(hidden_dims, conv_size)
            self.forget_conv = ShortConvolution(hidden_dims, conv_size)

    def take_part(self, group: Group) -> None:
        if "gate_norm" in self:
            self.gate_norm = ShardedRMSNorm(self.gate_norm, group)
        if "input_conv" in self:
            for conv in (self.input_conv, self.forget_conv):
                conv.weight = part_of(conv.weight, group)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> MLGRUState:
        names = [name for name in ("shared_conv", "input_conv", "forget_conv") if name in self]
        return MLGRUState(
            mx.zeros((batch_size, self._hidden_dims)),
            tuple(self[name].init_state(batch_size, dtype) for name in names),
        )

    def prepare(
        self, x: mx.array, state: MLGRUState, context: Context
    ) -> tuple[mx.array, MLGRUState]:
        x, last = self.shared_conv(x, state.convolutions[0], context)
        return x, state._replace(convolutions=(last,))

    def mix(
        self,
        i: mx.array,
        f: mx.array,
        g: mx.array,
        state: MLGRUState,
        context: Context,
        *,
        lower_bound: mx.array | None = None,
    ) -> tuple[mx.array, MLGRUState]:
        i, f, convolutions = self._convolved(i, f, state, context)
        h, last = gated_recurrence(i, f, state.hidden, context, lower_bound)
        g = g.astype(mx.float32)
        y = self.gate_norm(g) * silu(h) if "gate_norm" in self else mx.sigmoid(g) * h
        return y, MLGRUState(last, convolutions)

    def has_fused(self, context: Context) -> bool:
        return is_rms_norm(self.get("gate_norm"))

    def fused(
        self,
        gates: Parts,
        state: MLGRUState,
        context: Context,
        *,
        lower_bound: mx.array | None = None,
    ) -> tuple[mx.array, MLGRUState]:
        norm, convolutions = self["gate_norm"], state.convolutions
        if "input_conv" in self:
            i, f, g = self.apart(gates)
            i, f, convolutions = self._convolved(i, f, state, context)
            gates = (i, f, g)
        y, hidden = mlgru_step(
            beside(gates),
            state.hidden,
            norm["weight"],
            eps=norm.eps,
            lower_bound=lower_bound,
            valid=context.valid,
            starts=context.starts,
        )
        return y, MLGRUState(hidden, convolutions)

    def _convolved(
        self, i: mx.array, f: mx.array, state: MLGRUState, context: Context
    ) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
        """Input and forget gate after their short convolutions, and what these carry."""
        if "input_conv" not in self:
            return i, f, state.convolutions
        i, last_i = self.input_conv(i, state.convolutions[0], context)
        f, last_f = self.forget_conv(f, state.convolutions[1], context)
        return i, f, (last_i, last_f)

    def mixing_weights(
        self, x: mx.array, *, lower_bound: mx.array | None = None, **arguments: Any
    ) -> mx.array:
        check_sequences("MLGRU", x, self._dims)
        state, context = self.init_state(x.shape[0], x.dtype), Context()
        x, state = self.prepare(x, state, context) if self.prepares else (x, state)
        i, f, _ = self.apart(self.project(x))
        _, f, _ = self._convolved(i, f, state, context)
        return weights_of_gates(*bounded_gate(f, lower_bound))

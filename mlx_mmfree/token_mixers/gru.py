"""GRU, the gated recurrent unit (Cho et al., arXiv 1406.1078)."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx

from ..layers.arguments import check_optional_sizes, check_sequences, check_sizes
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import Linears, TokenMixer, factory_of
from ..layers.recurrence import weights_of_gates
from ..ops.splitting import positions

_GATES = ("reset_proj", "update_proj", "candidate_proj")


class GRUState(NamedTuple):
    """The state of a `GRU`.

    Attributes:
        hidden: The recurrent state, float32 `(B, E)`.

    Example:
        >>> y, state = GRU(32)(mx.zeros((2, 5, 32)))
        >>> state.hidden.shape
        (2, 32)
    """

    hidden: mx.array


class GRU(TokenMixer):
    r"""Gated recurrence whose gates see the state.

    .. math::
        r_t &= \sigma(W_r x_t + U_r h_{t-1}), \quad z_t = \sigma(W_z x_t + U_z h_{t-1}) \\
        \hat h_t &= \tanh\big(W x_t + r_t \odot (U h_{t-1})\big) \\
        h_t &= z_t \odot h_{t-1} + (1 - z_t) \odot \hat h_t, \quad y_t = W_o h_t

    These are the equations of cuDNN and PyTorch; in the paper's, the reset comes before the product,
    :math:`U (r_t \odot h_{t-1})`. Since the gates see the state, the positions are computed one after
    the other, in training and in reading as in decoding; only the products with `x` are done at once.
    A compiled graph grows with the length. It is the baseline of the recurrences that have a scan.

    Source: Cho et al., arXiv 1406.1078.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width `E` of the recurrence. Default: `dims`.
        resets_before: The reset comes before the product with the state.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each. :math:`U_r`, :math:`U_z` and :math:`U`
            are `hidden_reset_proj`, `hidden_update_proj` and `hidden_candidate_proj`.
        bias: Whether the projections, but for the output's, have a bias.

    Shape:
        `x` and `y`: `(B, L, D)`.

    State:
        `GRUState`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> y, state = GRU(32)(mx.zeros((1, 5, 32)))
        >>> y.shape, state.hidden.shape
        ((1, 5, 32), (1, 32))
    """

    equation: ClassVar[str] = "h_t = z_t h_(t-1) + (1 - z_t) tanh(W x_t + r_t (U h_(t-1)))"
    complexity: ClassVar[str] = "3 T D^2, one position after the other"
    paper: ClassVar[str] = "arXiv 1406.1078"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True
    packs_samples: ClassVar[bool] = True
    weighs_channels: ClassVar[bool] = True

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        resets_before: bool = False,
        linear: Linears = Linear,
        bias: bool = True,
    ):
        super().__init__()
        check_sizes("GRU", dims=dims)
        check_optional_sizes("GRU", hidden_dims=hidden_dims)
        hidden_dims = dims if hidden_dims is None else hidden_dims
        self._dims = dims
        self._hidden_dims = hidden_dims
        self._resets_before = resets_before
        for name in _GATES:
            self.make_projections(dims, {name: [hidden_dims]}, linear, bias=bias)
            name = f"hidden_{name}"
            self[name] = factory_of(linear, name)(hidden_dims, hidden_dims, bias=bias)
        self.make_output(hidden_dims, dims, linear)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> GRUState:
        return GRUState(mx.zeros((batch_size, self._hidden_dims)))

    def mix(
        self, r: mx.array, z: mx.array, c: mx.array, state: GRUState, context: Context
    ) -> tuple[mx.array, GRUState]:
        hidden = state.hidden
        states = []
        for n, step in enumerate(
            zip(*(positions(part, axis=1) for part in (r, z, c)), strict=True)
        ):
            old = hidden
            if context.starts is not None:
                hidden = mx.where(context.starts[:, n, None], 0.0, hidden)
            hidden, _ = self._step([part[:, 0] for part in step], hidden)
            if context.valid is not None:
                hidden = mx.where(context.valid[:, n, None], hidden, old)
            states.append(hidden)
        return mx.stack(states, axis=1), GRUState(hidden)

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        check_sequences("GRU", x, self._dims)
        hidden = self.init_state(x.shape[0], x.dtype).hidden
        gates = self.apart(self.project(x))
        updates = []
        for n in range(x.shape[1]):
            hidden, update = self._step([part[:, n] for part in gates], hidden)
            updates.append(update)
        update = mx.stack(updates, axis=1)
        return weights_of_gates(update, 1.0 - update)

    def _step(self, gates: list[mx.array], hidden: mx.array) -> tuple[mx.array, mx.array]:
        """The state after a position, and the share of the state before, float32 `(B, E)`.

        Args:
            gates: What the input adds to the reset, the update and the candidate, `(B, E)` each.
            hidden: The state before, float32 `(B, E)`.
        """
        dtype = gates[0].dtype
        of_reset, of_update, of_candidate = (part.astype(mx.float32) for part in gates)
        before = _GATES[:2] if self._resets_before else _GATES
        parts = self._of_state(before, hidden.astype(dtype))
        reset = mx.sigmoid(of_reset + parts[0])
        update = mx.sigmoid(of_update + parts[1])
        if self._resets_before:
            (inner,) = self._of_state(_GATES[2:], (reset * hidden).astype(dtype))
        else:
            inner = reset * parts[2]
        candidate = mx.tanh(of_candidate + inner)
        return update * hidden + (1.0 - update) * candidate, update

    def _of_state(self, gates: Sequence[str], hidden: mx.array) -> list[mx.array]:
        """The projections of the state before that gates add, float32 `(B, E)` each."""
        named = {f"hidden_{name}": [self._hidden_dims] for name in gates}
        return [part.astype(mx.float32) for part in self.results(hidden, named)]

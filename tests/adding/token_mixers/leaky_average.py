"""A causal mixer with a state of constant size."""

from typing import ClassVar, NamedTuple

import mlx.core as mx

from mlx_mmfree.layers import Linear
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import Linears, TokenMixer
from mlx_mmfree.ops import linear_scan


class LeakyAverageState(NamedTuple):
    """The average so far, float32 `(B, D)`."""

    average: mx.array


class LeakyAverage(TokenMixer):
    r"""A running average whose weights fall off with distance.

    .. math::
        h_t = a \odot h_{t-1} + (1 - a) \odot W_i x_t, \quad y_t = W_o h_t
    """

    equation: ClassVar[str] = "h_t = a * h_{t-1} + (1 - a) * W_i x_t"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "none"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self, dims: int, *, linear: Linears = Linear):
        super().__init__()
        self._dims = dims
        self.make_projections(dims, {"input_proj": [dims]}, linear)
        self.make_output(dims, dims, linear)
        self.decay = mx.linspace(-2.0, 2.0, dims)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> LeakyAverageState:
        return LeakyAverageState(mx.zeros((batch_size, self._dims)))

    def mix(
        self, u: mx.array, state: LeakyAverageState, context: Context
    ) -> tuple[mx.array, LeakyAverageState]:
        a = mx.broadcast_to(mx.sigmoid(self.decay.astype(mx.float32)), u.shape)
        new = (1 - a) * u.astype(mx.float32)
        if context.valid is not None:
            # padding leaves the state as it is
            a = mx.where(context.valid[..., None], a, 1.0)
            new = mx.where(context.valid[..., None], new, 0.0)
        h, last = linear_scan(a, new, state.average)
        return h, LeakyAverageState(last)

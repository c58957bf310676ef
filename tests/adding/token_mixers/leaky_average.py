"""A causal mixer with a state of constant size."""

from typing import ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import LinearFactory, TokenMixer
from mlx_mmfree.ops import linear_scan


class LeakyAverageState(NamedTuple):
    """The state of a `LeakyAverage`: the average so far, float32 `(B, D)`."""

    average: mx.array


class LeakyAverage(TokenMixer):
    r"""A running average whose weights fall off with distance.

    .. math::
        h_t = a \odot h_{t-1} + (1 - a) \odot W_i x_t, \quad y_t = W_o h_t

    Args:
        dims: Model dims `D`.
        linear: Makes a projection.
    """

    # the contract asks for what is declared here, and for nothing else
    equation: ClassVar[str] = "h_t = a * h_{t-1} + (1 - a) * W_i x_t"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "none"
    causal: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self, dims: int, *, linear: LinearFactory = nn.Linear):
        super().__init__()
        self._dims = dims
        self.input_proj = linear(dims, dims, bias=False)
        self.output_proj = linear(dims, dims, bias=False)
        self.decay = mx.linspace(-2.0, 2.0, dims)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> LeakyAverageState:
        return LeakyAverageState(mx.zeros((batch_size, self._dims)))

    def mix(
        self, x: mx.array, state: LeakyAverageState, context: Context
    ) -> tuple[mx.array, LeakyAverageState]:
        keep = mx.broadcast_to(mx.sigmoid(self.decay.astype(mx.float32)), x.shape)
        new = (1 - keep) * self.input_proj(x).astype(mx.float32)
        if context.valid is not None:
            # padding leaves the state as it is
            keep = mx.where(context.valid[..., None], keep, 1.0)
            new = mx.where(context.valid[..., None], new, 0.0)
        averages, last = linear_scan(keep, new, state.average)
        return self.output_proj(averages.astype(x.dtype)), LeakyAverageState(last)

"""A mixer for which every position sees the whole sequence."""

from typing import ClassVar

import mlx.core as mx

from mlx_mmfree.layers import Linear
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import Linears, TokenMixer


class MeanOfAll(TokenMixer):
    r"""Adds the mean of all positions to each, :math:`y_t = W_o(W_i x_t + \frac1L\sum_j W_i x_j)`.

    Args:
        dims: Model dims `D`.
        linear: Makes a projection.
    """

    equation: ClassVar[str] = "y_t = W_o (W_i x_t + mean_j W_i x_j)"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "none"
    bidirectional: ClassVar[bool] = True

    def __init__(self, dims: int, *, linear: Linears = Linear):
        super().__init__()
        self.make_projections(dims, {"input_proj": [dims]}, linear)
        self.make_output(dims, dims, linear)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, u: mx.array, state: tuple[()], context: Context) -> tuple[mx.array, tuple[()]]:
        u, valid = u.astype(mx.float32), context.valid
        seen = mx.ones(u.shape[:2]) if valid is None else valid.astype(mx.float32)
        # of a row of padding alone, the mean is zero
        count = mx.maximum(seen.sum(axis=1), 1.0)[:, None, None]
        mean = (u * seen[..., None]).sum(axis=1, keepdims=True) / count
        return u + mean, ()

"""A mixer that looks at a second sequence, and carries no state."""

from typing import ClassVar

import mlx.core as mx

from mlx_mmfree.layers import Linear
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.mixer import Linears, TokenMixer, factory_of


class GateByMemory(TokenMixer):
    r"""Gates each position by the mean of another sequence.

    .. math::
        y_t = W_o\,(W_i x_t \odot \sigma(W_m \bar m))

    Args:
        dims: Model dims `D`.
        linear: Makes a projection.
    """

    equation: ClassVar[str] = "y_t = W_o (W_i x_t * sigmoid(W_m mean(m)))"
    complexity: ClassVar[str] = "T D"
    paper: ClassVar[str] = "none"
    causal: ClassVar[bool] = True
    cross: ClassVar[bool] = True
    recurrent: ClassVar[bool] = True

    def __init__(self, dims: int, *, linear: Linears = Linear):
        super().__init__()
        self.make_projections(dims, {"input_proj": [dims]}, linear)
        self.memory_proj = factory_of(linear, "memory_proj")(dims, dims, bias=False)
        self.make_output(dims, dims, linear)

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
        return ()

    def mix(self, u: mx.array, state: tuple[()], context: Context) -> tuple[mx.array, tuple[()]]:
        memory = context.memory
        if memory is not None:
            shown = context.memory_valid
            seen = mx.ones(memory.shape[:2]) if shown is None else shown
            seen = seen.astype(mx.float32)[..., None]
            mean = (memory * seen).sum(axis=1, keepdims=True) / seen.sum(axis=1, keepdims=True)
            u = u * mx.sigmoid(self.memory_proj(mean.astype(u.dtype)))
        return u, ()

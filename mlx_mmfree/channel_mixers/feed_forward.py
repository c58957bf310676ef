"""Plain feed-forward (Vaswani et al., arXiv 1706.03762)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import mlx.core as mx

from ..layers import ChannelMixer
from ..layers.arguments import check_optional_sizes, check_sizes
from ..layers.dense import Linear
from ..layers.mixer import Linears, Partition
from ..ops import activate
from ..ops.activations import gelu_tanh, relu

FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "relu": relu,
    "gelu": partial(activate, activation="gelu"),
    "gelu_tanh": gelu_tanh,
    "silu": partial(activate, activation="silu"),
}
"""The activations of a feed-forward by their names."""


class FeedForward(ChannelMixer):
    r"""Two projections with an activation between them.

    .. math::
        y = W_\mathrm{down}\,a(W_\mathrm{up}\,x)

    Source: Vaswani et al., arXiv 1706.03762, sec. 3.3.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `4 * dims`.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        activation: `"relu"`, `"gelu"` for the exact GELU, `"gelu_tanh"` for its usual approximation, or
            `"silu"`.
        bias: Whether the projections have a bias.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, an input has other dims, or the activation is unknown.

    Example:
        >>> FeedForward(64)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    partition = Partition({"up_proj": 1}, rows="down_proj", counts=())

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Linears = Linear,
        activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "relu",
        bias: bool = True,
    ):
        super().__init__()
        check_sizes("FeedForward", dims=dims)
        check_optional_sizes("FeedForward", hidden_dims=hidden_dims)
        if activation not in FUNCTIONS:
            raise ValueError(
                f"[FeedForward] 'activation' must be one of {', '.join(FUNCTIONS)} but got "
                f"'{activation}'."
            )
        hidden_dims = 4 * dims if hidden_dims is None else hidden_dims
        self.make_projections(dims, {"up_proj": [hidden_dims]}, linear, bias=bias)
        self.make_output(hidden_dims, dims, linear, bias=bias, name="down_proj")
        self._activate = FUNCTIONS[activation]

    def mix(self, h: mx.array) -> mx.array:
        return self._activate(h)

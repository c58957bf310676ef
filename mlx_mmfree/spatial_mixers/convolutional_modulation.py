"""Values weighted by a convolution, the mixer of Conv2Former (Hou et al., arXiv 2211.11943)."""

from typing import ClassVar

import mlx.core as mx

from ..layers.dense import Linear
from ..layers.maps import DepthwiseConvolution
from ..layers.mixer import Linears, SpatialMixer
from ..ops import activate


class ConvolutionalModulation(SpatialMixer):
    r"""The weights of a position come from a large window, without a softmax.

    .. math::
        y = W_o\,\big(\mathrm{dwconv}_{k \times k}(\mathrm{gelu}(W_g x)) \odot W_v x\big)

    Source: Hou et al., arXiv 2211.11943.

    Args:
        dims: Dims `D`.
        kernel_size: Side `k` of the window, an odd number; 7 in the smallest published models.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> ConvolutionalModulation(32)(mx.zeros((1, 5, 4, 32))).shape
        (1, 5, 4, 32)
    """

    equation: ClassVar[str] = "y = W_o (dwconv(gelu(W_g x)) * W_v x)"
    complexity: ClassVar[str] = "T k^2 D"
    paper: ClassVar[str] = "arXiv 2211.11943"

    def __init__(self, dims: int, *, kernel_size: int = 11, linear: Linears = Linear):
        super().__init__()
        self.convolution = DepthwiseConvolution(dims, kernel_size)
        self._dims = dims
        inner = {"gate_proj": [dims], "value_proj": [dims]}
        self.make_projections(dims, inner, linear, bias=True)
        self.make_output(dims, dims, linear, bias=True)

    def mix(self, g: mx.array, v: mx.array) -> mx.array:
        y: mx.array = self.convolution(activate(g, "gelu")) * v
        return y

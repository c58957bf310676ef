"""The gated feed-forward family (Shazeer, arXiv 2002.05202)."""

from typing import ClassVar

import mlx.core as mx

from ..layers import ChannelMixer
from ..layers.arguments import check_sizes
from ..layers.dense import Linear
from ..layers.mixer import Linears, Partition
from ..layers.norms import RMSNorm
from ..ops.activations import ACTIVATIONS, Activation


class GatedLinearUnit(ChannelMixer):
    r"""Feed-forward whose hidden values are gated by an activation.

    .. math::
        y = W_\mathrm{down}\,\mathrm{norm}(a(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    A subclass names the activation `a`.

    Source: Shazeer, arXiv 2002.05202.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of an RMSNorm before the last projection; `None` means none.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> class Bilinear(GatedLinearUnit):
        ...     gate = "relu"
        >>> Bilinear(64, hidden_dims=96)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    gate: ClassVar[Activation | None]
    before_output = "hidden_norm"
    partition = Partition(
        {"gate_proj": 1, "up_proj": 1, "gate_up_proj": 2},
        rows="down_proj",
        norm="hidden_norm",
        counts=(),
    )

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int | None = None,
        linear: Linears = Linear,
        is_stacked: bool = False,
        bias: bool = False,
        norm_eps: float | None = None,
    ):
        super().__init__()
        check_sizes(type(self).__name__, dims=dims)
        hidden_dims = default_hidden_dims(dims) if hidden_dims is None else hidden_dims
        check_sizes(type(self).__name__, hidden_dims=hidden_dims)
        self._dims = dims
        inner = {"gate_proj": [hidden_dims], "up_proj": [hidden_dims]}
        if is_stacked:
            inner = {"gate_up_proj": [hidden_dims, hidden_dims]}
        self.make_projections(dims, inner, linear, bias=bias)
        if norm_eps is not None:
            self.hidden_norm = RMSNorm(hidden_dims, eps=norm_eps)
        self.make_output(hidden_dims, dims, linear, bias=bias, name="down_proj")

    def mix(self, g: mx.array, u: mx.array) -> mx.array:
        assert self.gate is not None
        return ACTIVATIONS[self.gate](g) * u


def default_hidden_dims(dims: int, ratio: float = 4) -> int:
    """`dims * ratio * 2 / 3`, rounded up to a multiple of 256."""
    return 256 * -(-int(dims * ratio * 2 / 3) // 256)


class SwiGLU(GatedLinearUnit):
    r"""Gated feed-forward with SiLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{silu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of an RMSNorm before the last projection; `None` means none.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> SwiGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "swiglu"
    gate = "silu"


class GeGLU(GatedLinearUnit):
    r"""Gated feed-forward with the exact GELU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{gelu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of an RMSNorm before the last projection; `None` means none.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> GeGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "geglu"
    gate = "gelu"


class ReGLU(GatedLinearUnit):
    r"""Gated feed-forward with ReLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{relu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of an RMSNorm before the last projection; `None` means none.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> ReGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "reglu"
    gate = "relu"


class SquaredReLUGLU(GatedLinearUnit):
    r"""Gated feed-forward with the square of ReLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{relu}(W_\mathrm{gate}\,x)^2 \odot W_\mathrm{up}\,x)

    The hidden values are float32: the squares of real models overflow float16.

    Source: the activation of So et al., arXiv 2109.08668, in the unit of BitNet b1.58 2B4T.

    Args:
        dims: Model dims `D`.
        hidden_dims: Width between the projections. Default: `8 * dims / 3`, rounded up to a multiple
            of 256.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`; or a mapping
            from the names of the projections to what makes each.
        is_stacked: Gate and up are the halves of one projection, gate first; with ternary weights
            they then share one scale.
        bias: Whether the projections have a bias.
        norm_eps: Epsilon of an RMSNorm before the last projection; `None` means none.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> SquaredReLUGLU(64, hidden_dims=128, norm_eps=1e-5)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "squared_relu_glu"
    gate = "relu2"

"""The gated feed-forward family (Shazeer, arXiv 2002.05202)."""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..layers import ChannelMixer, project_apart, project_gated
from ..layers.arguments import check_features, check_sizes
from ..layers.linear import project_sum
from ..layers.mixer import Linears, Partition, factory_of
from ..ops.activations import Activation
from ..ops.backend.dispatch import FLOATS


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
        ...     activation = "relu"
        >>> Bilinear(64, hidden_dims=96)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    activation: ClassVar[Activation]
    adds_branch = True
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
        linear: Linears = nn.Linear,
        is_stacked: bool = False,
        bias: bool = False,
        norm_eps: float | None = None,
    ):
        super().__init__()
        check_sizes(type(self).__name__, dims=dims)
        hidden_dims = default_hidden_dims(dims) if hidden_dims is None else hidden_dims
        check_sizes(type(self).__name__, hidden_dims=hidden_dims)
        self._dims = dims
        widths = {"gate_up_proj": 2 * hidden_dims}
        if not is_stacked:
            widths = {"gate_proj": hidden_dims, "up_proj": hidden_dims}
        makes = {name: factory_of(linear, name) for name in (*widths, "down_proj")}
        self.shared_inputs = tuple(widths)
        for name, width in widths.items():
            self[name] = makes[name](dims, width, bias=bias)
        if norm_eps is not None:
            self.hidden_norm = nn.RMSNorm(hidden_dims, eps=norm_eps)
        self.down_proj = makes["down_proj"](hidden_dims, dims, bias=bias)

    def __call__(
        self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None
    ) -> mx.array:
        if x.shape[-1:] != (self._dims,) or x.dtype not in FLOATS:
            check_features(type(self).__name__, x, self._dims)
        # items, since attributes of a module are slow to find
        inner, down = [self[name] for name in self["shared_inputs"]], self["down_proj"]
        parts, hidden_norm = project_apart(x, inner, norm=norm), self.get("hidden_norm")
        return project_gated(parts, down, self.activation, norm=hidden_norm, residual=residual)

    def of_sum(self, x: mx.array, branch: mx.array, norm: nn.Module | None) -> mx.array:
        inner, hidden_norm = [self[name] for name in self["shared_inputs"]], self.get("hidden_norm")
        parts, x = project_sum(x, branch, inner, norm=norm)
        down = self["down_proj"]
        return project_gated(parts, down, self.activation, norm=hidden_norm, residual=x)


def default_hidden_dims(dims: int, ratio: float = 4) -> int:
    """`dims * ratio * 2 / 3`, rounded up to a multiple of 256."""
    return 256 * -(-int(dims * ratio * 2 / 3) // 256)


class SwiGLU(GatedLinearUnit):
    r"""Gated feed-forward with SiLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{silu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> SwiGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "swiglu"
    activation = "silu"


class GeGLU(GatedLinearUnit):
    r"""Gated feed-forward with the exact GELU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{gelu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> GeGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "geglu"
    activation = "gelu"


class ReGLU(GatedLinearUnit):
    r"""Gated feed-forward with ReLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{relu}(W_\mathrm{gate}\,x) \odot W_\mathrm{up}\,x)

    Source: Shazeer, arXiv 2002.05202.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> ReGLU(64, hidden_dims=128)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "reglu"
    activation = "relu"


class SquaredReLUGLU(GatedLinearUnit):
    r"""Gated feed-forward with the square of ReLU.

    .. math::
        y = W_\mathrm{down}\,(\mathrm{relu}(W_\mathrm{gate}\,x)^2 \odot W_\mathrm{up}\,x)

    The hidden values are float32: the squares of real models overflow float16.

    Source: the activation of So et al., arXiv 2109.08668, in the unit of BitNet b1.58 2B4T.

    Args: as `GatedLinearUnit`.

    Shape: as `GatedLinearUnit`.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is not positive, or an input has other dims.

    Example:
        >>> SquaredReLUGLU(64, hidden_dims=128, norm_eps=1e-5)(mx.ones((1, 3, 64))).shape
        (1, 3, 64)
    """

    name = "squared_relu_glu"
    activation = "relu2"

"""The block of MobileNetV2 (Sandler et al., arXiv 1801.04381)."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ...ops.activations import hardswish
from ..branches.drop_path import DropPath
from ..linear_factory import LinearFactory
from .batch_norm import BatchNorm
from .convolution import Convolution
from .depthwise_convolution import DepthwiseConvolution


class InvertedBottleneck(nn.Module):
    r"""A depthwise convolution of more channels than there are before it and behind it.

    .. math::
        f(x) = \mathrm{norm}\Big(W_\mathrm{down}\,a\big(\mathrm{norm}(\mathrm{dwconv}(
        a(\mathrm{norm}(W_\mathrm{up}\,x))))\big)\Big), \quad
        y = f(x) \text{ or } x + \mathrm{drop}(f(x))

    Args:
        dims: Channels `D`.
        output_dims: Channels `E` of the result.
        hidden_dims: Channels between the projections; `None`: there is no :math:`W_\mathrm{up}`, and the
            convolution has `D` channels (depthwise separable convolution).
        kernel_size: Side of a window.
        stride: Step from window to window.
        activation: `a`.
        has_inner_norms: Whether there are all norms; if not, there is the last, and the layers before it
            have a bias.
        is_residual: Whether `x` is added.
        drop_path: Probability that training leaves the branch out for a sample, where `x` is added.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / stride, W / stride, E)`, rounded up.

    Parameters:
        Of the parts `up_proj`, `convolution` and `down_proj`.

    Raises:
        ValueError: `x` is to be added to a result of another shape.

    Example:
        >>> InvertedBottleneck(8, 16, hidden_dims=32, stride=2)(mx.zeros((1, 5, 4, 8))).shape
        (1, 3, 2, 16)
    """

    def __init__(
        self,
        dims: int,
        output_dims: int,
        *,
        hidden_dims: int | None = None,
        kernel_size: int = 3,
        stride: int = 1,
        activation: Callable[[mx.array], mx.array] = hardswish,
        has_inner_norms: bool = True,
        is_residual: bool = False,
        drop_path: float = 0.0,
        linear: LinearFactory = nn.Linear,
    ):
        super().__init__()
        if is_residual and (dims != output_dims or stride != 1):
            raise ValueError(
                "[InvertedBottleneck] 'is_residual' must be False for another number of channels or a "
                f"stride but got True for {dims} and {output_dims} dims and stride {stride}."
            )
        width = dims if hidden_dims is None else hidden_dims

        def inner_norm() -> BatchNorm | None:
            return BatchNorm(width) if has_inner_norms else None

        if hidden_dims is not None:
            self.up_proj = Convolution(
                dims, width, 1, bias=not has_inner_norms, norm=inner_norm(), linear=linear
            )
        self.convolution = DepthwiseConvolution(
            width, kernel_size, stride=stride, bias=not has_inner_norms, norm=inner_norm()
        )
        norm = BatchNorm(output_dims)
        self.down_proj = Convolution(width, output_dims, 1, bias=False, norm=norm, linear=linear)
        self._activate = activation
        self.drop_path = DropPath(drop_path)
        self._is_residual = is_residual

    def __call__(self, x: mx.array) -> mx.array:
        y = self._activate(self.up_proj(x)) if "up_proj" in self else x
        y = self.down_proj(self._activate(self.convolution(y)))
        return x + self.drop_path(y) if self._is_residual else y

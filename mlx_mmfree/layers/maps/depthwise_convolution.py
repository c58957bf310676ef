"""Convolution of each channel of a map by itself."""

import math

import mlx.core as mx
import mlx.nn as nn

from ...ops import depthwise_convolution
from ..arguments import check_sizes
from ..stored_layout import StoredLayout
from .batch_norm import BatchNorm


class DepthwiseConvolution(nn.Module):
    r"""Convolution of each channel with a window of its own, around every place or every `s`-th.

    .. math::
        y_{i,j,c} = b_c + \sum_{u,v} w_{c,u,v}\,
        x_{s i+u-\lfloor k/2 \rfloor,\,s j+v-\lfloor k/2 \rfloor,\,c}

    with zeros beyond the map.

    Args:
        dims: Channels `D`.
        kernel_size: Side `k` of the window, an odd number.
        stride: Step `s` from window to window.
        bias: Whether there is `b`.
        norm: Of the result; part of the layer, so that both are one convolution in evaluation.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / s, W / s, D)`, rounded up; `weight`: `(D, k, k, 1)`.

    Raises:
        ValueError: The window has no place in its middle.

    Example:
        >>> DepthwiseConvolution(8, 3)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(
        self,
        dims: int,
        kernel_size: int,
        *,
        stride: int = 1,
        bias: bool = True,
        norm: BatchNorm | None = None,
    ):
        super().__init__()
        check_sizes("DepthwiseConvolution", dims=dims, kernel_size=kernel_size, stride=stride)
        if kernel_size % 2 == 0:
            raise ValueError(
                f"[DepthwiseConvolution] 'kernel_size' must be odd but got {kernel_size}."
            )
        self._stride = stride
        bound = 1.0 / math.sqrt(kernel_size * kernel_size)
        self.weight = mx.random.uniform(-bound, bound, (dims, kernel_size, kernel_size, 1))
        if bias:
            self.bias = mx.zeros((dims,))
        if norm is not None:
            self.norm = norm

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        dims, side = self.weight.shape[:2]
        return {"weight": StoredLayout.reshaped((dims, 1, side, side), self.weight.shape)}

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.weight, self.get("bias")
        is_joined = "norm" in self and not self.norm.counts
        if is_joined:
            scale, shift = self.norm.scale_and_shift()
            weight = weight * scale[:, None, None, None]
            bias = shift if bias is None else bias * scale + shift
        y = depthwise_convolution(x, weight, bias, stride=self._stride)
        return self.norm(y) if "norm" in self and not is_joined else y

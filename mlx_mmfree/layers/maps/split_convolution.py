"""Convolutions of growing reach in groups of channels (EdgeNeXt, arXiv 2206.10589)."""

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_counts, check_sizes
from .depthwise_convolution import DepthwiseConvolution


class SplitConvolution(nn.Module):
    r"""Each group of channels is convolved together with what the group before it became.

    .. math::
        s_0 = \mathrm{conv}_0(x_0), \quad s_i = \mathrm{conv}_i(s_{i-1} + x_i), \quad
        y = [s_0, \dots, s_{n-1}, x_n]

    with depthwise convolutions of 3 x 3 places and groups of :math:`\lceil D / (n + 1) \rceil`
    channels, of which the last may be smaller and stays as it is.

    Args:
        dims: Channels `D`.
        num_convolutions: `n`; 0: nothing is changed.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        ValueError: There are fewer groups of that size than there must be.

    Example:
        >>> SplitConvolution(8, 1)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(self, dims: int, num_convolutions: int):
        super().__init__()
        check_sizes("SplitConvolution", dims=dims)
        check_counts("SplitConvolution", num_convolutions=num_convolutions)
        self._width = -(-dims // (num_convolutions + 1))
        if self._width * num_convolutions >= dims:
            raise ValueError(
                f"[SplitConvolution] 'num_convolutions' must leave channels for a last group but got "
                f"{num_convolutions} for {dims} dims."
            )
        self.convolutions = [DepthwiseConvolution(self._width, 3) for _ in range(num_convolutions)]

    def __call__(self, x: mx.array) -> mx.array:
        width = self._width
        parts: list[mx.array] = []
        for n, convolve in enumerate(self.convolutions):
            part = x[..., n * width : (n + 1) * width]
            parts.append(convolve(part + parts[-1] if parts else part))
        parts.append(x[..., len(parts) * width :])
        return mx.concatenate(parts, axis=-1)

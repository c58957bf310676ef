"""The residual block of convolutional networks since ConvNeXt (Liu et al., arXiv 2201.03545)."""

import mlx.core as mx
import mlx.nn as nn

from ..branches.drop_path import DropPath
from ..branches.layer_scale import LayerScale
from .depthwise_convolution import DepthwiseConvolution


class DepthwiseBlock(nn.Module):
    r"""A depthwise convolution mixes places, and a channel mixer what each of them holds, in one branch.

    .. math::
        y = x + \mathrm{drop}\big(\gamma \odot
        \mathrm{ChannelMixer}(\mathrm{norm}(\mathrm{dwconv}(x)))\big)

    Args:
        convolution: Mixes the places of each channel; a batch norm belongs to it.
        channel_mixer: Mixes within a place.
        norm: Any other norm; `None`: there is none.
        scale: The factors :math:`\gamma`; `None`: there are none.
        drop_path: Probability that training leaves the branch out for a sample.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Parameters:
        Of the parts `convolution`, `norm`, `channel_mixer` and `channel_scale`.
    """

    def __init__(
        self,
        convolution: DepthwiseConvolution,
        channel_mixer: nn.Module,
        *,
        norm: nn.Module | None = None,
        scale: LayerScale | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.convolution = convolution
        self.norm = nn.Identity() if norm is None else norm
        self.channel_mixer = channel_mixer
        self.channel_scale = nn.Identity() if scale is None else scale
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.channel_mixer(self.norm(self.convolution(x)))
        return x + self.drop_path(self.channel_scale(y)).astype(x.dtype)

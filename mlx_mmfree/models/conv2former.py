"""Conv2Former (Hou et al., arXiv 2211.11943): values weighted by convolutions, as in attention.

Names of tensors follow the paper's code. No weights are on the Hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..layers.dense import Linear
from ..layers.maps import Convolution, DepthwiseConvolution, pointwise
from ..layers.mixer import LinearFactory
from ..layers.norms import BatchNorm, LayerNorm
from ..ops import activate
from ..spatial_mixers.convolutional_modulation import ConvolutionalModulation
from .parts.architecture import Architecture, draw_weights
from .parts.fields import integer, integers, key
from .parts.image_classifier import ImageBlock, ImageClassifier, ImageConfig, staged

_NORM = partial(LayerNorm, eps=1e-6)
_GELU = partial(activate, activation="gelu")
_HEAD_DIMS = 1280
_RATIOS = (4, 4, 4, 4)
_SMALL = {"kernel_size": 11, "dims": (72, 144, 288, 576), "mlp_ratios": _RATIOS}


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one Conv2Former."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "conv2former_n": {
            "kernel_size": 7,
            "dims": (64, 128, 256, 512),
            "depths": (2, 2, 8, 2),
            "mlp_ratios": _RATIOS,
        },
        "conv2former_t": {**_SMALL, "depths": (3, 3, 12, 3)},
        "conv2former_s": {**_SMALL, "depths": (4, 4, 32, 4)},
        "conv2former_b": {
            "kernel_size": 11,
            "dims": (96, 192, 384, 768),
            "depths": (4, 4, 34, 4),
            "mlp_ratios": _RATIOS,
        },
        "conv2former_l": {
            "kernel_size": 11,
            "dims": (128, 256, 512, 1024),
            "depths": (4, 4, 48, 4),
            "mlp_ratios": _RATIOS,
        },
    }
    has_fixed_size: ClassVar[bool] = False

    kernel_size: int = key(
        "Side of the windows of the mixers, an odd number.", integer, 11, high=255
    )
    dims: tuple[int, ...] = key(
        "Dims of each of the four stages.", integers, (), count=4, low=2, high=2**14
    )
    depths: tuple[int, ...] = key("Blocks of each.", integers, (), count=4, high=512)
    mlp_ratios: tuple[int, ...] = key(
        "Width of the channel mixers of each, in dims.", integers, _RATIOS, count=4, high=64
    )

    def __post_init__(self) -> None:
        if self.kernel_size % 2 == 0:
            raise CheckpointError(
                f"[config.json] 'kernel_size' must be odd but got {self.kernel_size}."
            )

    @property
    def num_features(self) -> int:
        return _HEAD_DIMS


class ConvolutionalFeedForward(nn.Module):
    r"""A feed-forward whose hidden values see their neighbours.

    .. math::
        y = W_\mathrm{down}\,(h + \mathrm{gelu}(\mathrm{dwconv}_{3 \times 3}(h))), \quad
        h = \mathrm{gelu}(W_\mathrm{up}\,x)

    Args:
        dims: Dims `D`.
        hidden_dims: Width between the projections.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x` and `y`: `(B, H, W, D)`.
    """

    def __init__(self, dims: int, *, hidden_dims: int, linear: LinearFactory = Linear):
        super().__init__()
        self.up_proj = linear(dims, hidden_dims, bias=True)
        self.convolution = DepthwiseConvolution(hidden_dims, 3)
        self.down_proj = linear(hidden_dims, dims, bias=True)

    def __call__(self, x: mx.array) -> mx.array:
        h = activate(self.up_proj(x), "gelu")
        y: mx.array = self.down_proj(h + activate(self.convolution(h), "gelu"))
        return y


def conv2former_block(
    dims: int,
    *,
    kernel_size: int,
    mlp_ratio: int,
    drop_path: float = 0.0,
    linear: LinearFactory = Linear,
) -> ImageBlock:
    """One block, whose projections are stored as convolutions."""
    make = pointwise(linear)
    return ImageBlock(
        dims,
        ConvolutionalModulation(dims, kernel_size=kernel_size, linear=make),
        ConvolutionalFeedForward(dims, hidden_dims=mlp_ratio * dims, linear=make),
        norm=_NORM,
        layer_scale=1e-6,
        drop_path=drop_path,
    )


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    dims = config.dims
    half = dims[0] // 2
    embed = nn.Sequential(
        Convolution(config.input_channels, half, 3, stride=2, bias=False),
        _GELU,
        BatchNorm(half),
        Convolution(half, half, 3, bias=False),
        _GELU,
        BatchNorm(half),
        Convolution(half, dims[0], 2, stride=2, bias=False),
    )
    merges = [
        nn.Sequential(_NORM(before), Convolution(before, after, 2, stride=2))
        for before, after in pairwise(dims)
    ]
    neck = nn.Sequential(Convolution(dims[-1], _HEAD_DIMS, 1), _GELU, _NORM(_HEAD_DIMS))
    stages = staged(config.drop_path_rate, config.depths, partial(_block, config))
    head = config.class_head(_HEAD_DIMS)
    model = ImageClassifier(embed, stages, head, merges=merges, neck=neck, config=config)
    return draw_weights(model, 0.02)


def _block(config: Config, stage: int, index: int, drop_path: float) -> ImageBlock:
    return conv2former_block(
        config.dims[stage],
        kernel_size=config.kernel_size,
        mlp_ratio=config.mlp_ratios[stage],
        drop_path=drop_path,
        linear=config.linear(f"stages.{stage}.{index}"),
    )


_IN_BLOCK = {
    "attn.norm": "mixer_norm",
    "attn.att.0": "mixer.gate_proj.linear",
    "attn.att.2": "mixer.convolution",
    "attn.v": "mixer.value_proj.linear",
    "attn.proj": "mixer.output_proj.linear",
    "layer_scale_1": "mixer_scale.weight",
    "mlp.norm": "channel_norm",
    "mlp.fc1": "channel_mixer.up_proj.linear",
    "mlp.pos": "channel_mixer.convolution",
    "mlp.fc2": "channel_mixer.down_proj.linear",
    "layer_scale_2": "channel_scale.weight",
}

ARCHITECTURE = Architecture(
    name="conv2former",
    config=Config,
    build=build,
    weight_names={
        **{f"downsample_layers.0.{n}": f"embed.layers.{n}.linear" for n in (0, 3, 6)},
        **{f"downsample_layers.0.{n}": f"embed.layers.{n}" for n in (2, 5)},
        **{f"downsample_layers.{n}.0": f"merges.{n - 1}.layers.0" for n in range(1, 4)},
        **{f"downsample_layers.{n}.1": f"merges.{n - 1}.layers.1.linear" for n in range(1, 4)},
        **{f"stages.{{}}.{{}}.{a}": f"stages.{{}}.blocks.{{}}.{b}" for a, b in _IN_BLOCK.items()},
        "head.0": "neck.layers.0.linear",
        "head.2": "neck.layers.2",
        "pred": "head",
    },
    tiny={
        "architecture": "conv2former_n",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
        "model_args": {
            "kernel_size": 3,
            "dims": [8, 12, 16, 24],
            "depths": [1, 1, 2, 1],
            "mlp_ratios": [2, 2, 2, 2],
        },
    },
)

"""SwiftFormer (Shaker et al., arXiv 2303.15446): convolutions, and one additive attention a stage.

The published models have two heads, one of which was trained to say what another model says; their
logits are averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..layers import maps
from ..layers.dense import Linear
from ..layers.matrix import StoredLayout
from ..layers.mixer import LinearFactory
from ..layers.norms import BatchNorm
from ..ops.activations import relu
from ..spatial_mixers.additive_attention import AdditiveAttention
from .parts.architecture import Architecture, Published, draw_weights
from .parts.fields import integer, integers, key
from .parts.image_classifier import ImageClassifier, ImageConfig, staged


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one SwiftFormer."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "swiftformer_xs": {"embed_dims": (48, 56, 112, 220), "layers": (3, 3, 6, 4)},
        "swiftformer_s": {"embed_dims": (48, 64, 168, 224), "layers": (3, 3, 9, 6)},
        "swiftformer_l1": {"embed_dims": (48, 96, 192, 384), "layers": (4, 3, 10, 5)},
        "swiftformer_l3": {"embed_dims": (64, 128, 320, 512), "layers": (4, 4, 12, 6)},
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "downsamples": [False, True, True, True],
        "down_patch_size": 3,
        "down_stride": 2,
        "down_pad": 1,
        "use_layer_scale": True,
        "output_stride": 32,
    }

    embed_dims: tuple[int, ...] = key(
        "Dims of each of the four stages.", integers, (), count=4, low=2, high=2**14
    )
    layers: tuple[int, ...] = key("Blocks of each.", integers, (), count=4, high=512)
    mlp_ratios: int = key("Width of the channel mixers, in dims.", integer, 4, high=64)

    @property
    def num_features(self) -> int:
        return self.embed_dims[-1]


class _Scale(maps.LayerScale):
    """One that is stored as a map of one position."""

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        shape = self.weight.shape
        return {"weight": StoredLayout.reshaped((*shape, 1, 1), shape)}


class SwiftFormerBlock(nn.Module):
    r"""A convolutional branch, one of additive attention and one of a feed-forward.

    .. math::
        u = \mathrm{local}(x), \quad v = u + \mathrm{drop}(\gamma_1 \odot \mathrm{Attention}(u)), \quad
        y = v + \mathrm{drop}\big(\gamma_2 \odot \mathrm{FeedForward}(\mathrm{BN}(v))\big)

    Args:
        dims: Dims `D`.
        hidden_dims: Width of the feed-forward.
        drop_path: Probability that training leaves a branch out for a sample.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x` and `y`: `(B, H, W, D)`.
    """

    def __init__(
        self,
        dims: int,
        *,
        hidden_dims: int,
        drop_path: float = 0.0,
        linear: LinearFactory = Linear,
    ):
        super().__init__()
        self.local = convolutional_block(dims, hidden_dims=dims, linear=linear)
        self.mixer = AdditiveAttention(dims, linear=linear)
        self.mixer_scale = _Scale(dims, 1e-5)
        self.feed_forward_norm = BatchNorm(dims)
        self.feed_forward = _feed_forward(dims, hidden_dims, linear)
        self.feed_forward_scale = _Scale(dims, 1e-5)
        self.drop_path = maps.DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.local(x)
        x = x + self.drop_path(self.mixer_scale(self.mixer(x)))
        y = self.feed_forward_scale(self.feed_forward(self.feed_forward_norm(x)))
        return x + self.drop_path(y).astype(x.dtype)


class MeanHead(nn.Module):
    """The mean of the logits of two heads, one of them for distillation (DeiT, arXiv 2012.12877).

    Args:
        classes: Maps `(B, D)` to logits `(B, K)`.
        distilled: As `classes`, for distillation.

    Shape:
        `x`: `(B, D)`; logits `(B, K)`.
    """

    def __init__(self, classes: nn.Module, distilled: nn.Module):
        super().__init__()
        self.classes = classes
        self.distilled = distilled

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = (self.classes(x) + self.distilled(x)) / 2
        return y


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    dims = config.embed_dims
    embed = nn.Sequential(
        _halving(config.input_channels, dims[0] // 2),
        relu,
        _halving(dims[0] // 2, dims[0]),
        relu,
    )
    merges = [_halving(before, after) for before, after in pairwise(dims)]
    stages = staged(config.drop_path_rate, config.layers, partial(_block, config))
    head = MeanHead(config.class_head(dims[-1]), config.class_head(dims[-1]))
    neck = BatchNorm(dims[-1])
    model = ImageClassifier(embed, stages, head, merges=merges, neck=neck, config=config)
    return draw_weights(model, 0.02)


def convolutional_block(
    dims: int,
    *,
    hidden_dims: int,
    drop_path: float = 0.0,
    linear: LinearFactory = Linear,
) -> maps.DepthwiseBlock:
    """The convolutional branch of a `SwiftFormerBlock`; with more hidden dims, a block of its own."""
    return maps.DepthwiseBlock(
        maps.DepthwiseConvolution(dims, 3, norm=BatchNorm(dims)),
        _feed_forward(dims, hidden_dims, linear),
        scale=_Scale(dims, 1.0),
        drop_path=drop_path,
    )


def _block(config: Config, stage: int, index: int, drop_path: float) -> nn.Module:
    dims = config.embed_dims[stage]
    make = SwiftFormerBlock if index == config.layers[stage] - 1 else convolutional_block
    return make(
        dims,
        hidden_dims=config.mlp_ratios * dims,
        drop_path=drop_path,
        linear=config.linear(f"stages.{stage}.blocks.{index}"),
    )


def _feed_forward(dims: int, hidden_dims: int, linear: LinearFactory) -> FeedForward:
    return FeedForward(
        dims, hidden_dims=hidden_dims, linear=maps.pointwise(linear), activation="gelu"
    )


def _halving(dims: int, output_dims: int) -> maps.Convolution:
    return maps.Convolution(dims, output_dims, 3, stride=2, norm=BatchNorm(output_dims))


_CONVOLUTIONAL = {
    "dwconv": "convolution",
    "norm": "convolution.norm",
    "pwconv1": "channel_mixer.up_proj.linear",
    "pwconv2": "channel_mixer.down_proj.linear",
    "layer_scale.gamma": "channel_scale.weight",
}
_IN_BLOCK = {
    **_CONVOLUTIONAL,
    **{f"local_representation.{a}": f"local.{b}" for a, b in _CONVOLUTIONAL.items()},
    "attn.to_query": "mixer.query_proj",
    "attn.to_key": "mixer.key_proj",
    "attn.w_g": "mixer.query_weight",
    "attn.proj": "mixer.inner_proj",
    "attn.final": "mixer.output_proj",
    "layer_scale_1.gamma": "mixer_scale.weight",
    "linear.norm1": "feed_forward_norm",
    "linear.fc1": "feed_forward.up_proj.linear",
    "linear.fc2": "feed_forward.down_proj.linear",
    "layer_scale_2.gamma": "feed_forward_scale.weight",
}

ARCHITECTURE = Architecture(
    name="swiftformer",
    config=Config,
    build=build,
    weight_names={
        "stem.0": "embed.layers.0.linear",
        "stem.1": "embed.layers.0.norm",
        "stem.3": "embed.layers.2.linear",
        "stem.4": "embed.layers.2.norm",
        **{f"stages.{n}.downsample.proj": f"merges.{n - 1}.linear" for n in range(1, 4)},
        **{f"stages.{n}.downsample.norm": f"merges.{n - 1}.norm" for n in range(1, 4)},
        **{
            f"stages.{{}}.blocks.{{}}.{a}": f"stages.{{}}.blocks.{{}}.{b}"
            for a, b in _IN_BLOCK.items()
        },
        "norm": "neck",
        "head": "head.classes",
        "head_dist": "head.distilled",
    },
    tiny={
        "architecture": "swiftformer_xs",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
        "model_args": {
            "embed_dims": [8, 12, 16, 24],
            "layers": [1, 2, 1, 1],
            "mlp_ratios": 2,
        },
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

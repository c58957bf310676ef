"""An image architecture: patches instead of tokens, and a head for classes instead of words."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.maps import Convolution, DepthwiseConvolution
from mlx_mmfree.layers.mixer import LinearFactory
from mlx_mmfree.models.parts.architecture import Architecture, draw_weights
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.fields import HubConfig, integer, key
from mlx_mmfree.models.parts.image_classifier import ImageClassifier
from mlx_mmfree.models.parts.stack import Stack
from mlx_mmfree.token_mixers import GQA


@dataclass(frozen=True)
class Config(HubConfig):
    """The sizes of one model, read from `config.json` and written back to it."""

    model_type: ClassVar[str] = "see_classes"
    hub_class: ClassVar[str] = "SeeClasses"

    width: int = key("Model dims.", integer, high=2**17)
    classes: int = key("Number of classes.", integer, high=2**24)


class Patches(nn.Module):
    """Squares of 4 by 4 pixels of a grey image, mixed with their neighbours, one after the other."""

    def __init__(self, dims: int, linear: LinearFactory):
        super().__init__()
        self.proj = Convolution(1, dims, 4, stride=4, linear=linear)
        self.near = DepthwiseConvolution(dims, 3)
        self.mix = Convolution(dims, dims, 1)

    def __call__(self, images: mx.array) -> mx.array:
        return self.mix(self.near(self.proj(images))).flatten(1, 2)


def build(config: Config) -> ImageClassifier:
    dims, linear = config.width, partial(BitLinear, norm_eps=1e-6)
    attention = GQA(dims, num_heads=4, linear=linear, is_causal=False)
    block = Block(dims, attention, SwiGLU(dims, hidden_dims=2 * dims, linear=linear))
    stage = Stack([block], nn.RMSNorm(dims))
    head = nn.Linear(dims, config.classes)
    return draw_weights(ImageClassifier(Patches(dims, linear), [stage], head, config=config), 0.3)


ARCHITECTURE = Architecture(
    name="see_classes",
    config=Config,
    build=build,
    weight_names={
        "patches": "embed.proj.linear",
        "near": "embed.near",
        "mix": "embed.mix.linear",
        "stages.{}.layers.{}": "stages.{}.blocks.{}",
        "stages.{}.norm": "stages.{}.norm",
        "classes": "head",
    },
    sample=lambda config: mx.arange(64.0).reshape(1, 8, 8, 1) / 64,
    tiny={"width": 32, "classes": 3},
)

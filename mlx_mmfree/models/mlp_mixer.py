"""MLP-Mixer (Tolstikhin et al., arXiv 2105.01601), as in timm."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.nn as nn

from ..channel_mixers.feed_forward import FeedForward
from ..layers.layer_norm import LayerNorm
from ..token_mixers.mlp_mixer import MLPMixer
from .parts.architecture import Architecture, sample_images
from .parts.fields import integer, numbers
from .parts.image_block import ImageBlock
from .parts.image_classifier import ImageClassifier
from .parts.image_config import ImageConfig
from .parts.initialization import draw_weights
from .parts.patch_tokens import PatchTokens
from .parts.stage import Stage

_NORM = partial(LayerNorm, eps=1e-6)


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one MLP-Mixer.

    Attributes: as `ImageConfig`, and
        patch_size: Side of a patch.
        num_blocks: Blocks.
        embed_dim: Dims of a token.
        mlp_ratio: Widths of the perceptrons along the sequence and along the channels, in dims.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mixer_s32_224": {"patch_size": 32, "num_blocks": 8, "embed_dim": 512},
        "mixer_s16_224": {"patch_size": 16, "num_blocks": 8, "embed_dim": 512},
        "mixer_b32_224": {"patch_size": 32, "num_blocks": 12, "embed_dim": 768},
        "mixer_b16_224": {"patch_size": 16, "num_blocks": 12, "embed_dim": 768},
        "mixer_l32_224": {"patch_size": 32, "num_blocks": 24, "embed_dim": 1024},
        "mixer_l16_224": {"patch_size": 16, "num_blocks": 24, "embed_dim": 1024},
    }

    patch_size: int = 16
    num_blocks: int = 12
    embed_dim: int = 768
    mlp_ratio: tuple[float, ...] = (0.5, 4.0)

    @classmethod
    def read_sizes(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "patch_size": integer(sizes, "patch_size", high=2**10),
            "num_blocks": integer(sizes, "num_blocks", high=1024),
            "embed_dim": integer(sizes, "embed_dim", high=2**14),
            "mlp_ratio": numbers(sizes, "mlp_ratio", 2, (0.5, 4.0), low=1e-3, high=64.0),
        }

    @property
    def num_features(self) -> int:
        return self.embed_dim


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training form."""
    dims = config.embed_dim
    embed = PatchTokens(
        config.input_channels, dims, patch_size=config.patch_size, image_size=config.image_size
    )
    blocks = [_block(config, embed.length) for _ in range(config.num_blocks)]
    stage = draw_weights(Stage(blocks), 0.02)
    head = nn.Linear(dims, config.num_classes)
    return ImageClassifier(embed, [stage], head, neck=_NORM(dims), config=config)


def _block(config: Config, length: int) -> ImageBlock:
    dims = config.embed_dim
    along, across = (max(1, int(dims * ratio)) for ratio in config.mlp_ratio)
    mixer = MLPMixer(
        dims, max_length=length, num_hidden=along, linear=config.linear("blocks.mlp_tokens")
    )
    channel_mixer = FeedForward(
        dims,
        hidden_dims=across,
        linear=config.linear("blocks.mlp_channels"),
        activation="gelu",
    )
    # the same rate for every block, as in timm
    return ImageBlock(dims, mixer, channel_mixer, norm=_NORM, drop_path=config.drop_path_rate)


ARCHITECTURE = Architecture(
    name="mlp_mixer",
    config=Config,
    build=build,
    weight_names={
        "stem.proj": "embed.patches.linear",
        "blocks.{}.norm1": "stages.0.blocks.{}.mixer_norm",
        "blocks.{}.mlp_tokens.fc1": "stages.0.blocks.{}.mixer.up_length_proj",
        "blocks.{}.mlp_tokens.fc2": "stages.0.blocks.{}.mixer.down_length_proj",
        "blocks.{}.norm2": "stages.0.blocks.{}.channel_norm",
        "blocks.{}.mlp_channels.fc1": "stages.0.blocks.{}.channel_mixer.up_proj",
        "blocks.{}.mlp_channels.fc2": "stages.0.blocks.{}.channel_mixer.down_proj",
        "norm": "neck",
        "head": "head",
    },
    sample=sample_images,
    variants=Config.variants,
    tiny={
        "architecture": "mixer_b16_224",
        "num_classes": 5,
        "model_args": {"img_size": [16, 24], "patch_size": 8, "embed_dim": 24, "num_blocks": 2},
    },
)

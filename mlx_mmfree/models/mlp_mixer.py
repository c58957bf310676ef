"""MLP-Mixer (Tolstikhin et al., arXiv 2105.01601), as in timm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..channel_mixers.feed_forward import FeedForward
from ..token_mixers.mlp_mixer import MLPMixer
from .parts.architecture import Architecture, Published
from .parts.fields import key, numbers
from .parts.image_classifier import ImageBlock, ImageClassifier
from .parts.patch_model import PATCH_NORM, PatchConfig, build_patch_model


@dataclass(frozen=True)
class Config(PatchConfig):
    """The description of one MLP-Mixer."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "mixer_s32_224": {"patch_size": 32, "num_blocks": 8, "embed_dim": 512},
        "mixer_s16_224": {"patch_size": 16, "num_blocks": 8, "embed_dim": 512},
        "mixer_b32_224": {"patch_size": 32, "num_blocks": 12, "embed_dim": 768},
        "mixer_b16_224": {"patch_size": 16, "num_blocks": 12, "embed_dim": 768},
        "mixer_l32_224": {"patch_size": 32, "num_blocks": 24, "embed_dim": 1024},
        "mixer_l16_224": {"patch_size": 16, "num_blocks": 24, "embed_dim": 1024},
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "nlhb": False,
        "stem_norm": False,
    }

    mlp_ratio: tuple[float, ...] = key(
        "Widths of the perceptrons along the sequence and along the channels, in dims.",
        numbers,
        (0.5, 4.0),
        count=2,
        low=1e-3,
        high=64.0,
    )


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    return build_patch_model(config, _block)


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
    return ImageBlock(dims, mixer, channel_mixer, norm=PATCH_NORM, drop_path=config.drop_path_rate)


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
    tiny={
        "architecture": "mixer_b16_224",
        "num_classes": 5,
        "model_args": {"img_size": [16, 24], "patch_size": 8, "embed_dim": 24, "num_blocks": 2},
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

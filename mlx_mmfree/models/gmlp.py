"""gMLP (Liu et al., arXiv 2105.08050), as in timm."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import CheckpointError
from ..layers.matrix import StoredLayout
from ..token_mixers.gmlp import GMLP
from .parts.architecture import Architecture, Published
from .parts.fields import key, number
from .parts.image_classifier import ImageBlock, ImageClassifier
from .parts.patch_model import PATCH_NORM, PatchConfig, build_patch_model


@dataclass(frozen=True)
class Config(PatchConfig):
    """The description of one gMLP."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gmlp_ti16_224": {"patch_size": 16, "num_blocks": 30, "embed_dim": 128},
        "gmlp_s16_224": {"patch_size": 16, "num_blocks": 30, "embed_dim": 256},
        "gmlp_b16_224": {"patch_size": 16, "num_blocks": 30, "embed_dim": 512},
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "nlhb": False,
        "stem_norm": False,
    }

    mlp_ratio: float = key(
        "Channels that a block expands to, both halves, in dims.", number, 6.0, low=1e-3, high=64.0
    )

    def __post_init__(self) -> None:
        channels = int(self.embed_dim * self.mlp_ratio)
        if channels % 2:
            raise CheckpointError(
                f"[config.json] 'mlp_ratio' must make an even number of channels but makes {channels} "
                f"of 'embed_dim', {self.embed_dim}."
            )


class _Block(ImageBlock):
    """A block whose matrix along the sequence is stored as the weight of a linear layer."""

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        names = ("spatial_weight", "spatial_bias")
        shapes = {name: self.mixer[name].shape for name in names}
        return {
            f"mixer.{name}": StoredLayout.reshaped(shape[1:], shape)
            for name, shape in shapes.items()
        }


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    return build_patch_model(config, _block)


def _block(config: Config, length: int) -> ImageBlock:
    mixer = GMLP(
        config.embed_dim,
        max_length=length,
        hidden_dims=int(config.embed_dim * config.mlp_ratio),
        linear=config.linear("blocks.mlp_channels"),
        is_causal=False,
    )
    # the same rate for every block, as in timm
    return _Block(config.embed_dim, mixer, None, norm=PATCH_NORM, drop_path=config.drop_path_rate)


ARCHITECTURE = Architecture(
    name="gmlp",
    config=Config,
    build=build,
    weight_names={
        "stem.proj": "embed.patches.linear",
        "blocks.{}.norm": "stages.0.blocks.{}.mixer_norm",
        "blocks.{}.mlp_channels.fc1": "stages.0.blocks.{}.mixer.input_proj",
        "blocks.{}.mlp_channels.gate.norm": "stages.0.blocks.{}.mixer.gate_norm",
        "blocks.{}.mlp_channels.gate.proj.weight": "stages.0.blocks.{}.mixer.spatial_weight",
        "blocks.{}.mlp_channels.gate.proj.bias": "stages.0.blocks.{}.mixer.spatial_bias",
        "blocks.{}.mlp_channels.fc2": "stages.0.blocks.{}.mixer.output_proj",
        "norm": "neck",
        "head": "head",
    },
    tiny={
        "architecture": "gmlp_s16_224",
        "num_classes": 5,
        "model_args": {"img_size": [16, 24], "patch_size": 8, "embed_dim": 24, "num_blocks": 2},
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

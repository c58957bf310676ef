"""ViT (Dosovitskiy et al., arXiv 2010.11929) and DeiT (Touvron et al., arXiv 2012.12877), as in timm.

`token_mixer` in `config.json`, a key of our own, puts any bidirectional token mixer in place of softmax
attention; `mmfree mixers` lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import mlx.nn as nn

from ..channel_mixers.feed_forward import FeedForward
from ..errors import CheckpointError
from ..layers.layer_norm import LayerNorm
from .parts.architecture import Architecture, sample_images
from .parts.fields import boolean, integer, number
from .parts.image_block import ImageBlock
from .parts.image_classifier import ImageClassifier
from .parts.image_config import ImageConfig
from .parts.initialization import draw_weights
from .parts.mixer_choice import MixerChoice
from .parts.patch_tokens import PatchTokens
from .parts.stage import Stage, drop_rates

_TINY = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_ATTENTION = MixerChoice("multi_head_attention")
_NORM = partial(LayerNorm, eps=1e-6)


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one ViT.

    Attributes: as `ImageConfig`, and
        patch_size: Side of a patch.
        embed_dim: Dims of a token.
        depth: Blocks.
        num_heads: Heads of attention.
        mlp_ratio: Width of the channel mixer, in dims.
        qkv_bias: Whether queries, keys and values have a bias.
        token_mixer: What mixes tokens.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vit_tiny_patch16_224": _TINY,
        "vit_small_patch16_224": _SMALL,
        "deit_tiny_patch16_224": _TINY,
        "deit_small_patch16_224": _SMALL,
    }
    pool: ClassVar[str] = "token"

    patch_size: int = 16
    embed_dim: int = 192
    depth: int = 12
    num_heads: int = 3
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    token_mixer: MixerChoice = field(default_factory=lambda: _ATTENTION)

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        return ("token_mixer",)

    @classmethod
    def read_sizes(cls, sizes: Mapping[str, Any]) -> dict[str, Any]:
        dims = integer(sizes, "embed_dim", high=2**14)
        heads = integer(sizes, "num_heads", high=2**10)
        if dims % heads:
            raise CheckpointError(
                f"[config.json] 'num_heads' must divide 'embed_dim', {dims}, but got {heads}."
            )
        return {
            "patch_size": integer(sizes, "patch_size", high=2**10),
            "embed_dim": dims,
            "depth": integer(sizes, "depth", high=1024),
            "num_heads": heads,
            "mlp_ratio": number(sizes, "mlp_ratio", 4.0, low=1e-3, high=64.0),
            "qkv_bias": boolean(sizes, "qkv_bias", True),
        }

    @classmethod
    def read_own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("token_mixer") is None:
            return {}
        return {"token_mixer": MixerChoice.read("token_mixer", config["token_mixer"])}

    @property
    def num_features(self) -> int:
        return self.embed_dim

    def to_hub(self) -> dict[str, Any]:
        own = {"token_mixer": self.token_mixer.plain()} if self.token_mixer != _ATTENTION else {}
        return {**super().to_hub(), **own}


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training form.

    Raises:
        CheckpointError: An option of the mixer does not fit.
        UnsupportedModelError: The mixer is unknown, or cannot see a whole sequence.
    """
    embed = PatchTokens(
        config.input_channels,
        config.embed_dim,
        patch_size=config.patch_size,
        image_size=config.image_size,
        has_class_token=True,
        has_positions=True,
    )
    rates = drop_rates(config.drop_path_rate, [config.depth])[0]
    blocks = [_block(config, embed.length, rate) for rate in rates]
    stage = draw_weights(Stage(blocks), 0.02)
    head = nn.Linear(config.embed_dim, config.num_classes)
    neck = _NORM(config.embed_dim)
    return ImageClassifier(embed, [stage], head, neck=neck, pool="first", config=config)


def _block(config: Config, length: int, drop_path: float) -> ImageBlock:
    dims = config.embed_dim
    choice = config.token_mixer
    if choice == _ATTENTION:
        options = {"num_heads": config.num_heads, "bias": True, "is_stacked": True}
        if not config.qkv_bias:
            raise CheckpointError("[config.json] 'qkv_bias' must be true but got False.")
        choice = MixerChoice(choice.name, options)
    mixer = choice.token_mixer(
        dims, linear=config.linear("blocks.attn"), is_causal=False, max_length=length
    )
    channel_mixer = FeedForward(
        dims,
        hidden_dims=int(dims * config.mlp_ratio),
        linear=config.linear("blocks.mlp"),
        activation="gelu",
    )
    return ImageBlock(dims, mixer, channel_mixer, norm=_NORM, drop_path=drop_path)


ARCHITECTURE = Architecture(
    name="vit",
    config=Config,
    build=build,
    weight_names={
        "cls_token": "embed.class_token",
        "pos_embed": "embed.positions",
        "patch_embed.proj": "embed.patches.linear",
        "blocks.{}.norm1": "stages.0.blocks.{}.mixer_norm",
        "blocks.{}.attn": "stages.0.blocks.{}.mixer",
        "blocks.{}.attn.qkv": "stages.0.blocks.{}.mixer.qkv_proj",
        "blocks.{}.attn.proj": "stages.0.blocks.{}.mixer.output_proj",
        "blocks.{}.norm2": "stages.0.blocks.{}.channel_norm",
        "blocks.{}.mlp.fc1": "stages.0.blocks.{}.channel_mixer.up_proj",
        "blocks.{}.mlp.fc2": "stages.0.blocks.{}.channel_mixer.down_proj",
        "norm": "neck",
        "head": "head",
    },
    sample=sample_images,
    variants=Config.variants,
    tiny={
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "model_args": {
            "img_size": [32, 32],
            "patch_size": 8,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
        },
    },
)

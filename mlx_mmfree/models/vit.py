"""ViT (Dosovitskiy et al., arXiv 2010.11929) and DeiT (Touvron et al., arXiv 2012.12877), as in timm.

Two keys in `config.json` are our own. `token_mixer` puts any bidirectional token mixer in place of
softmax attention; `mmfree mixers` lists them. `token_selection`, an object with `keep` and
`hidden_dims`, lets every second block see a share of the tokens (`parts.selecting_stage`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from ..channel_mixers.feed_forward import FeedForward
from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers.norms import LayerNorm
from .parts.architecture import Architecture, sample_images
from .parts.fields import HubConfig, integer, key, number, refuse_unless, section
from .parts.image_block import ImageBlock
from .parts.image_classifier import ImageClassifier
from .parts.image_config import ImageConfig
from .parts.initialization import draw_weights
from .parts.mixer_choice import MixerChoice
from .parts.patch_tokens import PatchTokens
from .parts.selecting_stage import SelectingStage
from .parts.stage import Stage, drop_rates

_TINY = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_ATTENTION = MixerChoice("multi_head_attention")
_NORM = partial(LayerNorm, eps=1e-6)


@dataclass(frozen=True)
class TokenSelection(HubConfig):
    """Which tokens the second block of each pair sees."""

    keep: float = key("The share of tokens.", number, low=1e-3, high=1.0)
    hidden_dims: int = key("Width of the selectors.", integer, 16, high=2**12)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TokenSelection | None":
        """Reads the key `token_selection`; `None` if there is none."""
        described = section(config, "token_selection")
        if not described:
            return None
        refuse_unless(described, dict.fromkeys(described.keys() - {"keep", "hidden_dims"}))
        return cls.from_hub(described)


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one ViT."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vit_tiny_patch16_224": _TINY,
        "vit_small_patch16_224": _SMALL,
        "deit_tiny_patch16_224": _TINY,
        "deit_small_patch16_224": _SMALL,
    }
    pool: ClassVar[str] = "token"

    patch_size: int = key("Side of a patch.", integer, 16, high=2**10)
    embed_dim: int = key("Dims of a token.", integer, 192, high=2**14)
    depth: int = key("Blocks.", integer, 12, high=1024)
    num_heads: int = key("Heads of attention.", integer, 3, high=2**10)
    mlp_ratio: float = key("Width of the channel mixer, in dims.", number, 4.0, low=1e-3, high=64.0)
    token_mixer: MixerChoice = declare("What mixes tokens.", _ATTENTION)
    token_selection: TokenSelection | None = declare(
        "Which tokens the second block of each pair sees; `None`: all.", None
    )

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise CheckpointError(
                f"[config.json] 'num_heads' must divide 'embed_dim', {self.embed_dim}, but got "
                f"{self.num_heads}."
            )

    @classmethod
    def read_own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {"token_selection": TokenSelection.read(config)}
        if config.get("token_mixer") is not None:
            given["token_mixer"] = MixerChoice.read("token_mixer", config["token_mixer"])
            if given["token_selection"] and given["token_mixer"] != _ATTENTION:
                raise UnsupportedModelError(
                    "[config.json] 'token_selection' must be left out with another 'token_mixer' than "
                    f"{_ATTENTION.name}, whose scores it reads, but was given."
                )
        return given

    @property
    def num_features(self) -> int:
        return self.embed_dim

    def to_hub(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.token_mixer != _ATTENTION:
            own["token_mixer"] = self.token_mixer.plain()
        if self.token_selection is not None:
            own["token_selection"] = self.token_selection.write_keys()
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
    stage = draw_weights(_stage(config, blocks, embed.prefix), 0.02)
    head = config.class_head(config.embed_dim)
    neck = _NORM(config.embed_dim)
    return ImageClassifier(embed, [stage], head, neck=neck, pool="first", config=config)


def with_token_selection(
    model: ImageClassifier, *, keep: float, hidden_dims: int = 16
) -> ImageClassifier:
    """A ViT with fresh token selectors and its other weights.

    Args:
        model: A ViT with softmax attention, loaded with `packed=False`.
        keep: The share of tokens that every second block sees.
        hidden_dims: Width of the selectors.
    """
    selection = TokenSelection(keep, hidden_dims)
    new = build(replace(model.config, token_selection=selection))
    new.update(model.parameters(), strict=False)
    new.rounding = model.rounding
    return new


def _stage(config: Config, blocks: list[ImageBlock], prefix: int) -> Stage:
    selection = config.token_selection
    if selection is None:
        return Stage(blocks)
    if len(blocks) < 2:
        raise CheckpointError("[config.json] 'depth' must be at least 2 with 'token_selection'.")
    return SelectingStage(
        blocks, keep=selection.keep, hidden_dims=selection.hidden_dims, prefix=prefix
    )


def _block(config: Config, length: int, drop_path: float) -> ImageBlock:
    dims = config.embed_dim
    choice = config.token_mixer
    if choice == _ATTENTION:
        options = {"num_heads": config.num_heads, "bias": True, "is_stacked": True}
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
        "selectors.{}.fc1": "stages.0.selectors.{}.up_proj",
        "selectors.{}.fc2": "stages.0.selectors.{}.down_proj",
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

"""A model of images that reads patches in one stage of equal blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...layers.norms import LayerNorm
from .fields import integer, key
from .image_block import ImageBlock
from .image_classifier import ImageClassifier
from .image_config import ImageConfig
from .initialization import draw_weights
from .patch_tokens import PatchTokens
from .stage import Stage

PATCH_NORM = partial(LayerNorm, eps=1e-6)
"""Every norm of these models, as in timm."""


@dataclass(frozen=True)
class PatchConfig(ImageConfig):
    """The description of a model of patches."""

    patch_size: int = key("Side of a patch.", integer, 16, high=2**10)
    num_blocks: int = key("Blocks.", integer, 12, high=1024)
    embed_dim: int = key("Dims of a token.", integer, 768, high=2**14)

    @property
    def num_features(self) -> int:
        return self.embed_dim


Config = TypeVar("Config", bound=PatchConfig)


def build_patch_model(
    config: Config, block: Callable[[Config, int], ImageBlock]
) -> ImageClassifier:
    """A model with fresh weights, in its training form.

    Args:
        config: Its description.
        block: Makes a block of it for a number of tokens.
    """
    dims = config.embed_dim
    embed = PatchTokens(
        config.input_channels, dims, patch_size=config.patch_size, image_size=config.image_size
    )
    stage = Stage([block(config, embed.length) for _ in range(config.num_blocks)])
    head = config.class_head(dims)
    return ImageClassifier(
        embed, [draw_weights(stage, 0.02)], head, neck=PATCH_NORM(dims), config=config
    )

"""Models of images that read patches as tokens, in one stage of equal blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import UnsupportedModelError
from ...layers.maps import Convolution
from ...layers.norms import LayerNorm
from .architecture import draw_weights
from .fields import integer, key
from .image_classifier import ImageBlock, ImageClassifier, ImageConfig, Stage

_SHARPNESS = -0.5


def resized(x: mx.array, size: tuple[int, int]) -> mx.array:
    r"""A map with other numbers of rows and columns, as PyTorch and Pillow compute it.

    .. math::
        y_i = \sum_j w_{ij} x_j, \quad
        w_{ij} \propto k\Big(\frac{j + 0.5 - s\,(i + 0.5)}{\max(s, 1)}\Big), \quad \sum_j w_{ij} = 1

    along each axis, with the old size over the new one, `s`, and Keys' kernel `k` for :math:`a = -0.5`
    (IEEE Trans. ASSP 29, 1981).

    Args:
        x: `(B, H, W, D)`.
        size: Height and width of the result.

    Returns:
        `(B, height, width, D)`, in the dtype of `x`; computed in float32.

    Example:
        >>> resized(mx.ones((1, 4, 4, 2)), (6, 3)).shape
        (1, 6, 3, 2)
    """
    rows, columns = (
        mx.array(_weights(old, new)) for old, new in zip(x.shape[1:3], size, strict=True)
    )
    y = mx.einsum("ih,jw,bhwd->bijd", rows, columns, x.astype(mx.float32))
    return y.astype(x.dtype)


@lru_cache(maxsize=16)
def _weights(old: int, new: int) -> np.ndarray:
    """Weights of an axis, float32 `(new, old)`."""
    scale = old / new
    centers = scale * (np.arange(new)[:, None] + 0.5)
    weights = _kernel((np.arange(old) + 0.5 - centers) / max(scale, 1.0))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


def _kernel(distance: np.ndarray) -> np.ndarray:
    x, a = np.abs(distance), _SHARPNESS
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


class PatchTokens(nn.Module):
    r"""Squares of pixels, each mapped to a vector, row after row.

    .. math::
        x = [W\,\mathrm{patch}_1 + b, \dots, W\,\mathrm{patch}_N + b]

    with, if asked for, a learned class token before them, and a learned vector added to each token. For
    an image of another size, the vectors of patches are interpolated as by timm.

    Args:
        input_channels: Channels `C` of an image.
        dims: Dims `D` of a token.
        patch_size: Side of a square.
        image_size: Height and width of images.
        has_class_token: Whether there is a class token.
        has_positions: Whether there are learned positions.

    Shape:
        `images`: `(B, H, W, C)`; tokens `(B, N, D)`, or `(B, 1 + N, D)` with a class token.

    Parameters:
        Of `patches`; `class_token` `(1, 1, D)`; `positions` `(1, 1 + N, D)`.

    Raises:
        ValueError: An image has another size and there are no positions, or its sides are no multiples
            of the patch.
    """

    def __init__(
        self,
        input_channels: int,
        dims: int,
        *,
        patch_size: int,
        image_size: tuple[int, int],
        has_class_token: bool = False,
        has_positions: bool = False,
    ):
        super().__init__()
        if any(side < patch_size for side in image_size):
            raise UnsupportedModelError(
                f"[config.json] 'img_size' must be at least 'patch_size', {patch_size}, but got "
                f"{list(image_size)}."
            )
        self.patches = Convolution(input_channels, dims, patch_size, stride=patch_size)
        self._image_size = image_size
        self._patch_size = patch_size
        if has_class_token:
            self.class_token = mx.random.normal((1, 1, dims)) * 1e-6
        if has_positions:
            self.positions = mx.random.normal((1, self.length, dims)) * 0.02

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image of the model's size."""
        return self.grid_of(self._image_size)

    def grid_of(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image of another size."""
        height, width = image_size
        return height // self._patch_size, width // self._patch_size

    @property
    def prefix(self) -> int:
        """The number of tokens before the patches."""
        return int("class_token" in self)

    @property
    def length(self) -> int:
        """Tokens of an image."""
        rows, columns = self.grid
        return self.prefix + rows * columns

    def __call__(self, images: mx.array) -> mx.array:
        if images.shape[1:3] != self._image_size:
            self._check_other(images.shape)
        x = self.patches(images)
        rows, columns = x.shape[1:3]
        positions = self._positions((rows, columns)) if "positions" in self else None
        x = x.flatten(1, 2)
        if "class_token" in self:
            token = mx.broadcast_to(self.class_token, (x.shape[0], 1, x.shape[-1]))
            x = mx.concatenate([token.astype(x.dtype), x], axis=1)
        return x if positions is None else x + positions.astype(x.dtype)

    def _check_other(self, shape: tuple[int, ...]) -> None:
        if "positions" not in self:
            raise ValueError(
                f"[model] 'images' must have the height and width of the model, {self._image_size}, but "
                f"got shape {shape}."
            )
        if any(side % self._patch_size or not side for side in shape[1:3]):
            raise ValueError(
                "[model] 'images' must have the height and width of the model, "
                f"{self._image_size}, or multiples of its patches, {self._patch_size}, but got shape "
                f"{shape}."
            )

    def _positions(self, grid: tuple[int, int]) -> mx.array:
        """The learned vectors for so many rows and columns of patches."""
        if grid == self.grid:
            return self.positions
        own, patches = mx.split(self.positions, [self.prefix], axis=1)
        patches = resized(patches.reshape(1, *self.grid, -1), grid).flatten(1, 2)
        return mx.concatenate([own, patches], axis=1)


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
    """A model with fresh weights, in its training variant.

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

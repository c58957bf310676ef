"""Images as sequences: one vector for each square of pixels."""

import mlx.core as mx
import mlx.nn as nn

from ...errors import UnsupportedModelError
from ...layers.maps.bicubic import resized
from ...layers.maps.convolution import Convolution


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
        """How many tokens stand before those of patches."""
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

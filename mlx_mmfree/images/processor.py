"""Turns pictures into the arrays that a model of images reads."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import ImageError
from .configuration import CROP_MODES, INTERPOLATIONS, processor_settings
from .picture_file import MAX_PIXELS, read_picture, upright
from .pillow import require_pillow

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageProcessor:
    r"""Scales, crops and normalises pictures as the evaluation transform of timm does, bit for bit.

    .. math::
        y = \frac{\mathrm{crop}(\mathrm{resize}(x)) / 255 - \mathrm{mean}}{\mathrm{std}}

    Pillow resizes, with its own antialiasing, and rounds to 8 bits. Pictures of files are opened by
    `read_picture`. timm reads a picture in another way at two points: it neither turns it as its EXIF
    orientation says, nor scales 16-bit grey to 8 bits but cuts it off at 255.

    Args:
        size: Height and width of the result.
        scaled_size: Height and width to which a picture is scaled before it is cropped; `None` stands
            for `size`.
        channels: 3, or 1 for grey.
        crop_mode: `center` scales so that `scaled_size` is covered and keeps the middle; `border` scales
            so that the picture fits and fills the rest with the mean; `squash` changes its shape.
        interpolation: A filter of Pillow: nearest, box, bilinear, hamming, bicubic or lanczos.
        mean, std: A number for each channel, of values from 0 to 1.
        crop_rounds: Where as many pixels cannot be cut off on both sides, the first that stays is the
            nearest to the middle's (and even), as in timm; if not, the one before, as in transformers.

    Raises:
        ValueError: A name is unknown, or there is not one number for each channel.

    Example:
        >>> processor = ImageProcessor((2, 3), channels=1, mean=(0.5,), std=(0.5,))
        >>> processor([np.zeros((4, 9), np.uint8)]).shape
        (1, 2, 3, 1)
    """

    size: tuple[int, int]
    scaled_size: tuple[int, int] | None = None
    channels: int = 3
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_rounds: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("crop_mode", CROP_MODES), ("interpolation", INTERPOLATIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"[ImageProcessor] '{name}' must be one of {', '.join(choices)} but got "
                    f"{getattr(self, name)!r:.80}."
                )
        for name in ("mean", "std"):
            if len(getattr(self, name)) != self.channels:
                raise ValueError(
                    f"[ImageProcessor] '{name}' must have {self.channels} numbers, one for each "
                    f"channel, but got {getattr(self, name)}."
                )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ImageProcessor":
        """The processor that the configuration of a checkpoint asks for.

        Args:
            config: timm's `config.json` or the `pretrained_cfg` in it, or the `preprocessor_config.json`
                of transformers for ViT, DeiT or PoolFormer. Values that are missing are timm's defaults.

        Raises:
            CheckpointError: A value is not what it must be.
            UnsupportedModelError: It is an image processor that is not known.
        """
        return cls(**processor_settings(config))

    def __call__(self, pictures: Sequence[Any]) -> mx.array:
        """Prepares pictures as one batch.

        Args:
            pictures: Names of files, arrays of `uint8` of shape `(H, W)`, `(H, W, 1)` or `(H, W, 3)`,
                or pictures of Pillow.

        Returns:
            float32 `(B, H, W, C)`.

        Raises:
            ImageError: As for `read_picture`, or a picture is too long for its width.
            ValueError: There is no picture, or an array is of another shape or dtype.
        """
        if not pictures:
            raise ValueError("[ImageProcessor] 'pictures' must hold at least one but is empty.")
        pixels = np.stack([np.asarray(self.view(picture)) for picture in pictures])
        pixels = pixels.reshape(*pixels.shape[:3], self.channels)
        # in the order of torchvision, and in float32 as there
        scaled = pixels.astype(np.float32) / np.float32(255)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return mx.array((scaled - mean) / std)

    def view(self, picture: Any) -> "Image":
        """What of a picture a model sees, scaled and cropped, as a picture of Pillow.

        Args:
            picture: As for a call.

        Raises:
            ImageError, ValueError: As for a call.
        """
        opened, mode = _opened(picture), "RGB" if self.channels == 3 else "L"
        opened = opened if opened.mode == mode else opened.convert(mode)
        return self._cropped(self._scaled(opened))

    def _scaled(self, picture: "Image") -> "Image":
        from PIL import Image

        width, height = picture.size
        rows, columns = self.scaled_size or self.size
        if self.crop_mode == "center" and rows == columns:
            short, long = min(width, height), max(width, height)
            longer = int(rows * long / short)
            rows, columns = (longer, rows) if width <= height else (rows, longer)
        elif self.crop_mode != "squash":
            choose = max if self.crop_mode == "border" else min
            ratio = choose(height / rows, width / columns)
            rows, columns = round(height / ratio), round(width / ratio)
        if not rows or not columns or rows * columns > MAX_PIXELS:
            raise ImageError(
                f"[image] a picture must not be this much longer than wide but got {width} x {height} "
                f"pixels, which would be scaled to {columns} x {rows}. Crop it."
            )
        if (columns, rows) == picture.size:
            return picture
        return picture.resize((columns, rows), Image.Resampling[self.interpolation.upper()])

    def _cropped(self, picture: "Image") -> "Image":
        from PIL import Image

        rows, columns = self.size
        width, height = picture.size
        padded = (max(width, columns), max(height, rows))
        if padded != picture.size:
            filling = self.mean if self.crop_mode == "border" else (0.0,) * self.channels
            colour = tuple(round(255 * value) for value in filling)
            whole = Image.new(picture.mode, padded, colour if self.channels == 3 else colour[0])
            whole.paste(picture, ((padded[0] - width) // 2, (padded[1] - height) // 2))
            picture = whole
        whole_pixel = round if self.crop_rounds else math.floor
        left, top = whole_pixel((padded[0] - columns) / 2), whole_pixel((padded[1] - rows) / 2)
        return picture.crop((left, top, left + columns, top + rows))


def _opened(picture: Any) -> "Image":
    require_pillow()
    from PIL import Image

    if isinstance(picture, Image.Image):
        return upright(picture)
    if isinstance(picture, str | os.PathLike):
        return read_picture(picture)
    pixels = np.asarray(picture)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (3,)):
        raise ValueError(
            "[ImageProcessor] 'pictures' must be files, pictures of Pillow, or arrays of uint8 of shape "
            f"(H, W), (H, W, 1) or (H, W, 3) but got {pixels.dtype} {pixels.shape}."
        )
    return Image.fromarray(pixels)

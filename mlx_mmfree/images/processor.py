"""How images are prepared for a model, as its files say, which are untrusted, and its classes' names.

Two formats are known: timm's `pretrained_cfg`, as `timm.data.resolve_data_config` reads it, and the
`preprocessor_config.json` of a few image processors of transformers.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, ImageError, UnsupportedModelError
from .picture_file import MAX_PIXELS, read_picture, require_pillow, upright

if TYPE_CHECKING:
    from PIL.Image import Image


_FILE = "imagenet_classes.txt"


def imagenet_names(pretrained_cfg: Mapping[str, Any], count: int) -> list[str]:
    """The names of ImageNet's classes in their order; none where a model was trained on something else.

    The list is torchvision's; NOTICE has its licence.

    Args:
        pretrained_cfg: That of timm's `config.json`. Its tag ends with what a model was trained on last.
        count: Number of the model's classes.
    """
    names = files(__package__).joinpath(_FILE).read_text(encoding="utf-8").splitlines()
    is_trained_on_them = str(pretrained_cfg.get("tag")).endswith("in1k")
    return names if is_trained_on_them and count == len(names) else []


INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
CROP_MODES = ("center", "squash", "border")
MAX_SIDE = 8192
"""Pixels of a side that no model leaves."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TYPES = ("image_processor_type", "feature_extractor_type")
_STANDARD: Mapping[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "ViT": {
        **_STANDARD,
        "do_center_crop": False,
        "resample": 2,
        "size": {"height": 224, "width": 224},
    },
    "DeiT": {
        **_STANDARD,
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
        "size": {"height": 256, "width": 256},
    },
    "PoolFormer": {
        "crop_pct": 0.9,
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "image_mean": _IMAGENET_MEAN,
        "image_std": _IMAGENET_STD,
        "resample": 3,
        "size": {"shortest_edge": 224},
    },
}
"""By the prefix of its class name, what a processor takes for keys that are left out."""

# the numbers of PIL.Image.Resampling
_RESAMPLING = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))


def processor_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ImageProcessor` that a configuration asks for.

    Args:
        config: timm's `config.json` or its `pretrained_cfg`, or the `preprocessor_config.json` of
            transformers.

    Raises:
        CheckpointError: A value is not what it must be.
        UnsupportedModelError: The image processor is not known.
    """
    for key in _TYPES:
        if key in config:
            return _of_transformers(config, config[key])
    # older files of timm hold the same keys without a section of their own
    sections = (config.get("pretrained_cfg", config), config.get("model_args") or {})
    for key, given in zip(("pretrained_cfg", "model_args"), sections, strict=True):
        if not isinstance(given, Mapping):
            raise _wrong(key, "an object", given)
    return _of_timm(*sections)


def _of_timm(config: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by timm's keys, where the model may have been made for other images."""
    # an empty value stands for timm's default
    given = {key: value for key, value in config.items() if value}
    shape = given.get("input_size", (3, 224, 224))
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise _wrong("input_size", "a list of channels, height and width", shape)
    side = model.get("img_size", shape[1:])
    size = side if isinstance(side, list | tuple) else (side, side)
    if len(size) != 2:
        raise _wrong("img_size", "a number, or a height and a width", side)
    size = tuple(
        _side("img_size" if "img_size" in model else "input_size", entry) for entry in size
    )
    channels = model.get("in_chans", shape[0])
    if channels not in (1, 3):
        raise _wrong("input_size", "that of images of 1 or 3 channels", channels)
    share = _number("crop_pct", given.get("crop_pct", 0.875), low=0.01, high=4.0)
    return {
        "size": size,
        "scaled_size": _scaled(size, share),
        "channels": channels,
        "crop_mode": _choice("crop_mode", given.get("crop_mode", "center"), CROP_MODES),
        "interpolation": _choice(
            "interpolation", given.get("interpolation", "bicubic"), INTERPOLATIONS
        ),
        "mean": _per_channel("mean", given.get("mean", _IMAGENET_MEAN), channels),
        "std": _per_channel("std", given.get("std", _IMAGENET_STD), channels, low=1e-6),
    }


def _of_transformers(config: Mapping[str, Any], kind: object) -> dict[str, Any]:
    name = next((name for name in _PROCESSORS if str(kind).startswith(name)), None)
    if name is None:
        raise UnsupportedModelError(
            f"[ImageProcessor] 'image_processor_type' must be that of {', '.join(_PROCESSORS)} but got "
            f"{kind!r:.80}. Other processors are not implemented."
        )
    config = {**_PROCESSORS[name], **config}
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(key, True) is not True:
            raise _wrong(key, "true", config[key])
    factor = _number("rescale_factor", config.get("rescale_factor", 1 / 255), low=0, high=1)
    if not math.isclose(factor, 1 / 255):
        raise _wrong("rescale_factor", "1 / 255", factor)
    resample = config.get("resample")
    if isinstance(resample, bool) or not isinstance(resample, int) or resample not in _RESAMPLING:
        raise _wrong("resample", f"one of {', '.join(map(str, _RESAMPLING))}", resample)
    is_shortest, size = _size("size", config.get("size"))
    scaled = size
    if config["do_center_crop"] is True:
        if name == "PoolFormer":
            share = _number("crop_pct", config["crop_pct"], low=0.01, high=4.0)
            is_shortest, scaled = True, _scaled(size, share)
        _, size = _size("crop_size", config["crop_size"])
    elif is_shortest:
        raise _wrong("size", "a height and a width where nothing is cropped", config["size"])
    return {
        "size": size,
        "scaled_size": scaled,
        "channels": 3,
        "crop_mode": "center" if is_shortest else "squash",
        "crop_rounds": False,
        "interpolation": _RESAMPLING[resample],
        "mean": _per_channel("image_mean", config.get("image_mean"), 3),
        "std": _per_channel("image_std", config.get("image_std"), 3, low=1e-6),
    }


def _scaled(size: tuple[int, int], share: float) -> tuple[int, int]:
    """The size of which `size` is the given share."""
    rows, columns = (math.floor(side / share) for side in size)
    if not rows or not columns:
        raise _wrong("crop_pct", f"at most the smaller side, {min(size)}", share)
    return rows, columns


def _size(key: str, value: Any) -> tuple[bool, tuple[int, int]]:
    """Returns whether a size is the shortest edge's, and the height and width that it gives."""
    if isinstance(value, Mapping):
        if set(value) == {"shortest_edge"}:
            side = _side(key, value["shortest_edge"])
            return True, (side, side)
        if set(value) != {"height", "width"}:
            raise _wrong(key, "a number, a height and a width, or a shortest edge", dict(value))
        return False, (_side(key, value["height"]), _side(key, value["width"]))
    side = _side(key, value)
    return False, (side, side)


def _side(key: str, value: Any) -> int:
    # some writers of JSON give whole numbers a fraction of zero
    side = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= MAX_SIDE:
        raise _wrong(key, f"of whole numbers from 1 to {MAX_SIDE}", value)
    return side


def _number(key: str, value: Any, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise _wrong(key, f"a number from {low:g} to {high:g}", value)
    return float(value)


def _per_channel(key: str, value: Any, channels: int, *, low: float = -1e3) -> tuple[float, ...]:
    """A number for each channel; a single one counts for all of them."""
    if not isinstance(value, list | tuple) or len(value) not in (1, channels):
        raise _wrong(key, f"a list of {channels} numbers", value)
    numbers = tuple(_number(key, entry, low=low, high=1e3) for entry in value)
    return numbers * (channels // len(numbers))


def _choice(key: str, value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise _wrong(key, f"one of {', '.join(choices)}", value)
    return value


def _wrong(key: str, rule: str, value: Any) -> CheckpointError:
    return CheckpointError(f"[ImageProcessor] '{key}' must be {rule} but got {value!r:.80}.")


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
        """The part of a picture that a model sees, scaled and cropped, as a picture of Pillow.

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

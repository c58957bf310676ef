"""Reads how pictures are prepared from the files of a checkpoint, which are untrusted.

Two forms are known: timm's `pretrained_cfg`, as `timm.data.resolve_data_config` reads it, and the
`preprocessor_config.json` of a few image processors of transformers.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError

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
"""By the beginning of its class name, what a processor takes for keys that are left out."""

# the numbers of PIL.Image.Resampling
_RESAMPLING = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))


def processor_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `ImageProcessor` that a configuration asks for.

    Args:
        config: timm's `config.json` or its `pretrained_cfg`, or the `preprocessor_config.json` of
            transformers.

    Raises:
        CheckpointError: A value is not what it must be.
        UnsupportedModelError: It is that of an image processor that is not known.
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
    """Whether a size is that of the shortest edge, and the height and width that it gives."""
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

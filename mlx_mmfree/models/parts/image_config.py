"""The description of a model of images, in the form of timm's `config.json`.

A family subclasses `ImageConfig` with fields for its sizes, named as timm's keyword arguments are, and
lists its published models in `variants` of its record. Everything else here is common to all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import mlx.nn as nn

from ...errors import CheckpointError, UnsupportedModelError
from ...files.declared import declare
from ...layers.mixer import LinearFactory
from .fields import HubConfig, integer, number, refuse_unless, section
from .ternary_linears import TernaryLinears, linear_of

_COMMON = ("img_size", "in_chans", "num_classes", "global_pool", "drop_path_rate")
"""Keys of `model_args` that every family has, beside its own sizes."""

_MOST_PIXELS = 2**13


@dataclass(frozen=True)
class ImageConfig(HubConfig):
    """What all models of images have in common.

    A `config.json` names a variant under `architecture`; `model_args` has what differs from it, as the
    keyword arguments of `timm.create_model`, which reads the same file.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    pool: ClassVar[str] = "avg"
    has_fixed_size: ClassVar[bool] = True
    """Whether timm makes the models for one size of images, `img_size`; others read any size."""

    architecture: str = declare("The name of the variant.")
    num_classes: int = declare(
        "Classes `K`; 0: the model gives the vector of an image, as in timm."
    )
    image_size: tuple[int, int] = declare("Height and width for which the model was made.")
    input_channels: int = declare("Channels of an image, 3 or 1.")
    drop_path_rate: float = declare(
        "Stochastic depth of the last block in training; it grows from 0 at the first.", 0.0
    )
    linears: TernaryLinears | None = declare(
        "What ternary linears of the blocks compute; `None`: all are dense.", None
    )
    pretrained_cfg: Mapping[str, Any] = declare(
        "How images are prepared, as the file has it; `images.ImageProcessor` reads it.",
        factory=dict,
    )
    label_names: tuple[str, ...] = declare(
        "The classes' names: for ImageNet, those of synsets.", ()
    )
    label_descriptions: Mapping[str, str] = declare("What these names mean.", factory=dict)

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for a model that is not implemented.
        """
        name = config.get("architecture")
        if name not in cls.variants:
            raise UnsupportedModelError(
                f"[config.json] 'architecture' must be one of {', '.join(sorted(cls.variants))} but "
                f"got {name!r:.100}."
            )
        prepared = section(config, "pretrained_cfg")
        given = section(config, "model_args")
        own = [each.name for each in fields(cls) if "read" in each.metadata]
        unknown = [key for key in given if key not in (*own, *_COMMON)]
        if unknown:
            raise UnsupportedModelError(
                f"[config.json] 'model_args' must have keys among {', '.join((*own, *_COMMON))} but "
                f"got {unknown[0]!r:.100}. Others are not implemented."
            )
        for part in (config, given):
            refuse_unless(part, {"global_pool": cls.pool})
        channels, *size = _input_size(prepared)
        count = integer({"num_classes": 1000, **prepared, **config, **given}, "num_classes", low=0)
        return cls(
            architecture=str(name),
            num_classes=count,
            image_size=_pair("img_size", given.get("img_size", size)),
            input_channels=integer(given, "in_chans", channels, high=1024),
            drop_path_rate=number(given, "drop_path_rate", 0.0, low=0.0, high=0.99),
            linears=TernaryLinears.from_hub(config),
            pretrained_cfg=dict(prepared),
            label_names=_label_names(config.get("label_names"), count),
            label_descriptions=_descriptions(section(config, "label_descriptions")),
            **cls.read_keys({**cls.variants[str(name)], **given}),
            **cls.read_own(config),
        )

    @classmethod
    def read_own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that are keys of `config.json` itself, which timm does not know, as `from_hub`."""
        return {}

    @property
    def num_features(self) -> int:
        """Dims of the vector that the head reads, for `config.json`."""
        raise NotImplementedError

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` that `from_hub` and timm read back."""
        written = type(self).read_keys(self.variants[self.architecture])
        arguments = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.write_keys().items()
            if value != written[name]
        }
        prepared = dict(self.pretrained_cfg)
        channels, *size = _input_size(prepared)
        if self.image_size != tuple(size):
            if self.has_fixed_size:
                arguments["img_size"] = list(self.image_size)
            else:
                prepared["input_size"] = [channels, *self.image_size]
        if self.input_channels != channels:
            arguments["in_chans"] = self.input_channels
        if self.drop_path_rate:
            arguments["drop_path_rate"] = self.drop_path_rate
        config: dict[str, Any] = {
            "architecture": self.architecture,
            "num_classes": self.num_classes,
            "num_features": self.num_features,
            "global_pool": self.pool,
        }
        if self.label_names:
            config["label_names"] = list(self.label_names)
        if self.label_descriptions:
            config["label_descriptions"] = dict(self.label_descriptions)
        if arguments:
            config["model_args"] = arguments
        if prepared:
            config["pretrained_cfg"] = prepared
        if self.linears is not None:
            config["quantization_config"] = self.linears.to_hub()
        return config

    def linear(self, name: str) -> LinearFactory:
        """Makes the linear of a block with this name on the Hub, dense or ternary."""
        return linear_of(self.linears, name)

    def class_head(self, dims: int) -> nn.Module:
        """Makes the linear of the logits; without classes it leaves vectors of `dims` as they are."""
        return nn.Linear(dims, self.num_classes) if self.num_classes else nn.Identity()

    @property
    def labels(self) -> tuple[str, ...]:
        """What each class is called; empty where the file does not say."""
        return tuple(self.label_descriptions.get(name, name) for name in self.label_names)


def _input_size(prepared: Mapping[str, Any]) -> list[int]:
    """Channels, height and width that the file says, or those of most models."""
    size = prepared.get("input_size", [3, 224, 224])
    if not isinstance(size, list | tuple) or len(size) != 3:
        raise CheckpointError(
            "[config.json] 'input_size' must be a list of channels, height and width but got "
            f"{size!r:.100}."
        )
    names = ("channels", "height", "width")
    sizes = dict(zip(names, size, strict=True))
    return [integer(sizes, name, high=_MOST_PIXELS) for name in names]


def _pair(key: str, value: object) -> tuple[int, int]:
    sides = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2:
        raise CheckpointError(
            f"[config.json] '{key}' must be a number, or a list of height and width, but got "
            f"{value!r:.100}."
        )
    height, width = (integer({key: side}, key, high=_MOST_PIXELS) for side in sides)
    return height, width


def _label_names(value: object, count: int) -> tuple[str, ...]:
    if value is None:
        return ()
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(isinstance(name, str) for name in value)
    ):
        raise CheckpointError(
            f"[config.json] 'label_names' must be a list of {count} names but got {value!r:.100}."
        )
    return tuple(value)


def _descriptions(value: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(
            "[config.json] 'label_descriptions' must have a text for each name but has others."
        )
    return dict(value)

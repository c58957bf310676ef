"""Models of images: their description in the format of timm's `config.json`, blocks, stages and head.

A family subclasses `ImageConfig` with fields for its sizes, named as timm's keyword arguments are, and
lists its published models in `variants` of its record. Everything else here is common to all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError, UnsupportedModelError
from ...files.declared import declare
from ...layers.dense import Linear
from ...layers.maps import DropPath, LayerScale
from ...layers.mixer import LinearFactory, SpatialMixer, TokenMixer
from ...ops.long_sums import long_sum
from .fields import HubConfig, integer, number, refuse_unless, section
from .ternary_linears import TernaryLinears, linear_of

_COMMON = ("img_size", "in_chans", "num_classes", "global_pool", "drop_path_rate")
"""Keys of `model_args` that every family has, beside its own sizes."""

_RATES = ("drop_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate", "patch_drop_rate")
_STARTS = ("weight_init", "fix_init", "ls_init_value", "layer_scale_init_value", "head_init_scale")
"""Keys of timm that count in training, and before it, alone."""

_MOST_PIXELS = 2**13


@dataclass(frozen=True)
class ImageConfig(HubConfig):
    """Base class of image models.

    A `config.json` names a variant under `architecture`; `model_args` has what differs from it, as the
    keyword arguments of `timm.create_model`, which reads the same file.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    pool: ClassVar[str] = "avg"
    has_fixed_size: ClassVar[bool] = True
    """True if timm makes the models for one size of images, `img_size`; others read any size."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Further keyword arguments of timm, with the values that are implemented."""

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
        "The classes' names: for ImageNet, names of synsets.", ()
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
        idle = (*_RATES, *_STARTS, *cls.usual)
        unknown = [key for key in given if key not in (*own, *_COMMON, *idle)]
        if unknown:
            raise UnsupportedModelError(
                f"[config.json] 'model_args' must have keys among {', '.join((*own, *_COMMON))} but "
                f"got {unknown[0]!r:.100}. Others are not implemented."
            )
        for rate in given.keys() & set(_RATES):
            number(given, rate, low=0.0, high=1.0)
        refuse_unless(given, cls.usual)
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
        return Linear(dims, self.num_classes) if self.num_classes else nn.Identity()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; empty where the file does not give them."""
        return tuple(self.label_descriptions.get(name, name) for name in self.label_names)


def _input_size(prepared: Mapping[str, Any]) -> list[int]:
    """Channels, height and width as the file says, or as most models have them."""
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


class ImageBlock(nn.Module):
    r"""Two residual branches, each after a norm (MetaFormer, arXiv 2111.11418).

    .. math::
        u = x + \mathrm{drop}\big(\gamma_1 \odot \mathrm{Mixer}(\mathrm{norm}(x))\big), \quad
        y = u + \mathrm{drop}\big(\gamma_2 \odot \mathrm{ChannelMixer}(\mathrm{norm}(u))\big)

    Args:
        dims: Dims `D`.
        mixer: A spatial mixer, of maps; or a bidirectional token mixer, of sequences.
        channel_mixer: Mixes within a position; `None`: there is no second branch, as where the mixer has
            an expansion of the channels of its own.
        norm: Makes a norm, called as `norm(dims)`.
        layer_scale: What the factors :math:`\gamma` are at first; `None`: there are none.
        drop_path: Probability that training leaves a branch out for a sample.

    Shape:
        `x` and `y`: maps `(B, H, W, D)` with a spatial mixer, sequences `(B, N, D)` with a token mixer.

    Parameters:
        Of the parts `mixer_norm`, `mixer`, `mixer_scale`, and `channel_norm`, `channel_mixer`,
        `channel_scale`.
    """

    def __init__(
        self,
        dims: int,
        mixer: SpatialMixer | TokenMixer,
        channel_mixer: nn.Module | None,
        *,
        norm: Callable[[int], nn.Module],
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        for name, branch in (("mixer", mixer), ("channel_mixer", channel_mixer)):
            if branch is not None:
                kind = name.partition("_")[0]
                self[f"{kind}_norm"] = norm(dims)
                self[name] = branch
                if layer_scale is not None:
                    self[f"{kind}_scale"] = LayerScale(dims, layer_scale)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.mixer(self.mixer_norm(x))
        # a token mixer gives its state too
        return self.completed(x, y[0] if isinstance(y, tuple) else y)

    def completed(self, x: mx.array, branch: mx.array) -> mx.array:
        """The result for `x` where this is what the mixer gives."""
        x = self._added(x, branch, "mixer_scale")
        if "channel_mixer" not in self:
            return x
        return self._added(x, self.channel_mixer(self.channel_norm(x)), "channel_scale")

    def _added(self, x: mx.array, branch: mx.array, scale: str) -> mx.array:
        if scale in self:
            branch = self[scale](branch)
        return x + self.drop_path(branch).astype(x.dtype)


class Stage(nn.Module):
    """Blocks and what follows the last.

    Args:
        blocks: The blocks, first to last. Each maps an array to one of the same shape, as `ImageBlock`
            does, or the first to one of fewer positions and other dims. A family whose blocks differ
            writes its own in its file.
        norm: What stands between the last block and the next stage or the pooling: a norm, or any
            other module that maps positions to positions; `None`: nothing.

    Shape:
        `x` and `y`: maps `(B, H, W, D)`, or sequences `(B, N, D)`.
    """

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module | None = None):
        super().__init__()
        self.blocks = list(blocks)
        self.norm = nn.Identity() if norm is None else norm

    def transform(self, x: mx.array) -> mx.array:
        return self.from_last(self.until_last(x))

    def until_last(self, x: mx.array) -> mx.array:
        """The input of the last block."""
        for block in self.blocks[:-1]:
            x = block(x)
        return x

    def from_last(self, x: mx.array) -> mx.array:
        """The result of the last block and the norm, from `until_last`."""
        for block in self.blocks[-1:]:
            x = block(x)
        y: mx.array = self.norm(x)
        return y


def drop_rates(last: float, depths: Sequence[int]) -> list[list[float]]:
    """The rates of `DropPath` for the blocks of each stage: 0 for the first, growing up to `last`."""
    count = sum(depths)
    rates = iter([last * n / max(1, count - 1) for n in range(count)])
    return [[next(rates) for _ in range(depth)] for depth in depths]


def staged(
    last: float, depths: Sequence[int], block: Callable[[int, int, float], nn.Module]
) -> list[Stage]:
    """The stages of a model, whose blocks `block` makes of the stage, the index in it and the rate."""
    return [
        Stage([block(stage, index, rate) for index, rate in enumerate(rates)])
        for stage, rates in enumerate(drop_rates(last, depths))
    ]


Pool = Literal["mean", "first"]


class AnyStage(Protocol):
    """The interface of a stage of an `ImageClassifier`, such as a `Stage` or a `Stack`."""

    def transform(self, x: mx.array) -> mx.array:
        """Vectors of the same shape."""


class ImageClassifier(nn.Module):
    r"""Patches, stages of blocks, neck, one vector of each image, head.

    .. math::
        y = \mathrm{head}\big(\mathrm{pool}_p(\mathrm{neck}(x_p))\big), \quad
        x = \mathrm{stage}_n(\mathrm{merge}_n(\ldots\mathrm{stage}_1(\mathrm{embed}(\mathrm{image}))))

    Source: MetaFormer (Yu et al., arXiv 2111.11418).

    Args:
        embed: Maps images `(B, H, W, C)` to vectors of patches, a sequence `(B, N, D)` or a map
            `(B, H', W', D)`.
        stages: Map them to such of the same dims.
        head: Maps `(B, D)` to `(B, K)`, a logit for each class. A norm after the pooling is part of it.
            Where `config` has no classes, it gives features in place of logits.
        merges: One between each stage and the next, which changes dims and positions; `None` where they
            stay.
        neck: What stands between the last stage and the pooling, such as a norm; `None`: nothing.
        pool: The vector of an image is the mean of all positions, or the first of a sequence, as where a
            class token stands there.
        config: The architecture's configuration, stored as the attribute `config`.

    Attributes:
        pipeline: The task of such a model, as the Hub names it.
        purpose: The same as part of an error message.
        command: The command that uses such a model.
        rounding: How its packed weights were made of floats, as `hub.checkpoint.checkpoint` has it.

    Shape:
        `images`: `(B, H, W, C)`; logits `(B, K)`.

    Raises:
        ValueError: There is not one merge between each two stages, or the pooling is unknown.

    Example:
        >>> embed = nn.Sequential(nn.Conv2d(3, 32, 4, stride=4), lambda x: x.flatten(1, 2))
        >>> stage = Stack([Block(32, GQA(32, is_causal=False), SwiGLU(32))], nn.RMSNorm(32))
        >>> model = ImageClassifier(embed, [stage], nn.Linear(32, 10))
        >>> model(mx.zeros((1, 16, 16, 3))).shape
        (1, 10)
    """

    pipeline = "image-classification"
    purpose = "sorting images into classes"
    command = "classify"

    def __init__(
        self,
        embed: nn.Module,
        stages: Sequence[AnyStage],
        head: nn.Module,
        *,
        merges: Sequence[nn.Module | None] | None = None,
        neck: nn.Module | None = None,
        pool: Pool = "mean",
        config: Any = None,
    ):
        super().__init__()
        merges = [None] * (len(stages) - 1) if merges is None else merges
        if len(merges) != len(stages) - 1:
            raise ValueError(
                "[ImageClassifier] 'merges' must have one entry between each two stages but has "
                f"{len(merges)} for {len(stages)} stages."
            )
        if pool not in get_args(Pool):
            known = ", ".join(map(repr, get_args(Pool)))
            raise ValueError(
                f"[ImageClassifier] 'pool' must be one of {known} but got {pool!r:.80}."
            )
        self.embed = embed
        self.stages = list(stages)
        self.merges = [nn.Identity() if merge is None else merge for merge in merges]
        self.neck = nn.Identity() if neck is None else neck
        self.head = head
        self.config = config
        self._pool = pool

    def features(self, images: mx.array) -> mx.array:
        """The vectors that are pooled, `(B, N, D)` or `(B, H', W', D)`."""
        y: mx.array = self.neck(self.stages[-1].transform(self._entering_last_stage(images)))
        return y

    def until_last_block(self, images: mx.array) -> mx.array:
        """The vectors that enter the last block of the last stage.

        Raises:
            ValueError: Its blocks belong to a text model, and are not called one by one.
        """
        return self._last_stage.until_last(self._entering_last_stage(images))

    def from_last_block(self, x: mx.array) -> mx.array:
        """The logits that follow from `until_last_block`; raises as that does."""
        return self.logits(self.neck(self._last_stage.from_last(x)))

    def logits(self, features: mx.array) -> mx.array:
        """The logits `(B, K)` that follow from `features`."""
        y: mx.array = self.head(self._pooled(features))
        return y

    @property
    def num_logits(self) -> int:
        """Classes `K`."""
        return int(self.config.num_classes)

    @property
    def dims(self) -> int:
        """Dims of the vector of an image."""
        return int(self.config.num_features)

    def check_classes(self, name: str) -> None:
        """Refuses a model without classes.

        Args:
            name: What needs them, for the message.

        Raises:
            UnsupportedModelError: There are none.
        """
        if getattr(self.config, "num_classes", None) == 0:
            raise UnsupportedModelError(
                f"[{name}] the model must have classes but its 'num_classes' is 0. Train a head on it "
                "first, with 'new_head' of 'mmfree train'."
            )

    def predictions(self, images: mx.array) -> mx.array:
        return self(images)

    def __call__(self, images: mx.array) -> mx.array:
        return self.logits(self.features(images))

    def _entering_last_stage(self, images: mx.array) -> mx.array:
        x = self.embed(images)
        for stage, merge in zip(self.stages, self.merges, strict=False):
            x = merge(stage.transform(x))
        return x

    @property
    def _last_stage(self) -> Stage:
        stage = self.stages[-1]
        if not isinstance(stage, Stage):
            raise ValueError(
                "[ImageClassifier] the last of 'stages' must be a 'Stage' of blocks of images but is a "
                f"{type(stage).__name__}."
            )
        return stage

    def _pooled(self, x: mx.array) -> mx.array:
        """The vector of each image, `(B, D)`."""
        if self._pool == "first":
            return x[:, 0]
        positions = x.reshape(x.shape[0], -1, x.shape[-1])
        return (long_sum(positions, axis=-2) / positions.shape[1]).astype(x.dtype)

"""EfficientViT of MIT (Cai et al., arXiv 2205.14756): linear attention of rectified queries and keys.

Microsoft's model of the same name (arXiv 2305.07027) is another. Training may leave out branches, as the
original code does; timm's models of this family do not take a `drop_path_rate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..layers.dense import Linear
from ..layers.maps import Convolution, DepthwiseConvolution, DropPath
from ..layers.mixer import LinearFactory
from ..layers.norms import BatchNorm, LayerNorm
from ..ops.activations import hardswish
from ..spatial_mixers.multi_scale_attention import MultiScaleAttention
from .parts.architecture import Architecture, Published
from .parts.fields import integer, integers, key
from .parts.image_classifier import ImageClassifier, ImageConfig, Stage, drop_rates


class InvertedBottleneck(nn.Module):
    r"""A depthwise convolution of more channels than there are before and after it.

    .. math::
        f(x) = \mathrm{norm}\Big(W_\mathrm{down}\,a\big(\mathrm{norm}(\mathrm{dwconv}(
        a(\mathrm{norm}(W_\mathrm{up}\,x))))\big)\Big), \quad
        y = f(x) \text{ or } x + \mathrm{drop}(f(x))

    Args:
        dims: Channels `D`.
        output_dims: Channels `E` of the result.
        hidden_dims: Channels between the projections; `None`: there is no :math:`W_\mathrm{up}`, and the
            convolution has `D` channels (depthwise separable convolution).
        kernel_size: Side of a window.
        stride: Step from window to window.
        activation: `a`.
        has_inner_norms: Whether there are all norms; if not, there is the last, and the layers before it
            have a bias.
        is_residual: Whether `x` is added.
        drop_path: Probability that training leaves the branch out for a sample, where `x` is added.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / stride, W / stride, E)`, rounded up.

    Parameters:
        Of the parts `up_proj`, `convolution` and `down_proj`.

    Raises:
        ValueError: `x` is to be added to a result of another shape.

    Example:
        >>> InvertedBottleneck(8, 16, hidden_dims=32, stride=2)(mx.zeros((1, 5, 4, 8))).shape
        (1, 3, 2, 16)
    """

    def __init__(
        self,
        dims: int,
        output_dims: int,
        *,
        hidden_dims: int | None = None,
        kernel_size: int = 3,
        stride: int = 1,
        activation: Callable[[mx.array], mx.array] = hardswish,
        has_inner_norms: bool = True,
        is_residual: bool = False,
        drop_path: float = 0.0,
        linear: LinearFactory = Linear,
    ):
        super().__init__()
        if is_residual and (dims != output_dims or stride != 1):
            raise ValueError(
                "[InvertedBottleneck] 'is_residual' must be False for another number of channels or a "
                f"stride but got True for {dims} and {output_dims} dims and stride {stride}."
            )
        width = dims if hidden_dims is None else hidden_dims

        def inner_norm() -> BatchNorm | None:
            return BatchNorm(width) if has_inner_norms else None

        if hidden_dims is not None:
            self.up_proj = Convolution(
                dims, width, 1, bias=not has_inner_norms, norm=inner_norm(), linear=linear
            )
        self.convolution = DepthwiseConvolution(
            width, kernel_size, stride=stride, bias=not has_inner_norms, norm=inner_norm()
        )
        norm = BatchNorm(output_dims)
        self.down_proj = Convolution(width, output_dims, 1, bias=False, norm=norm, linear=linear)
        self._activate = activation
        self.drop_path = DropPath(drop_path)
        self._is_residual = is_residual

    def __call__(self, x: mx.array) -> mx.array:
        y = self._activate(self.up_proj(x)) if "up_proj" in self else x
        y = self.down_proj(self._activate(self.convolution(y)))
        return x + self.drop_path(y) if self._is_residual else y


_FIRST_WITH_ATTENTION = 2
"""The first stage whose blocks have attention."""
_MOST_STEM_BLOCKS = 8


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one EfficientViT."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "efficientvit_b0": {
            "widths": (8, 16, 32, 64, 128),
            "depths": (1, 2, 2, 2, 2),
            "head_dim": 16,
            "head_widths": (1024, 1280),
        },
        "efficientvit_b1": {
            "widths": (16, 32, 64, 128, 256),
            "depths": (1, 2, 3, 3, 4),
            "head_dim": 16,
            "head_widths": (1536, 1600),
        },
        "efficientvit_b2": {
            "widths": (24, 48, 96, 192, 384),
            "depths": (1, 3, 4, 4, 6),
            "head_dim": 32,
            "head_widths": (2304, 2560),
        },
        "efficientvit_b3": {
            "widths": (32, 64, 128, 256, 512),
            "depths": (1, 4, 6, 6, 9),
            "head_dim": 32,
            "head_widths": (2304, 2560),
        },
    }
    has_fixed_size: ClassVar[bool] = False

    widths: tuple[int, ...] = key(
        "Dims of the stem and of each of the four stages.", integers, (), count=5, high=2**14
    )
    depths: tuple[int, ...] = key(
        "Blocks of the stem; then blocks of each stage, in the last two with attention after one "
        "without it.",
        integers,
        (),
        count=5,
        low=0,
        high=512,
    )
    head_dim: int = key("Dims of a head of attention.", integer, 32, high=2**14)
    expand_ratio: int = key(
        "Width of the convolutions of a block, in dims.", integer, 4, low=2, high=64
    )
    head_widths: tuple[int, ...] = key(
        "Dims before the pooling and after it.", integers, (), count=2
    )

    def __post_init__(self) -> None:
        if any(width % self.head_dim for width in self.widths[1 + _FIRST_WITH_ATTENTION :]):
            raise CheckpointError(
                "[config.json] 'head_dim' must divide the last two of 'widths', "
                f"{list(self.widths)}, but got {self.head_dim}."
            )
        if self.depths[0] > _MOST_STEM_BLOCKS:
            raise CheckpointError(
                f"[config.json] 'depths' must begin with at most {_MOST_STEM_BLOCKS} but got "
                f"{self.depths[0]}."
            )

    @property
    def num_features(self) -> int:
        return self.widths[-1]


class EfficientViTBlock(nn.Module):
    r"""Attention, then an inverted bottleneck.

    .. math::
        u = x + \mathrm{drop}(\mathrm{Attention}(x)), \quad
        y = u + \mathrm{drop}(\mathrm{Bottleneck}(u))

    Args:
        dims: Dims `D`.
        head_dim: Dims of a head.
        hidden_dims: Width of the bottleneck.
        drop_path: Probability that training leaves a branch out for a sample.
        linear: Makes a projection, called as `linear(input_dims, output_dims, bias=...)`.

    Shape:
        `x` and `y`: `(B, H, W, D)`.
    """

    def __init__(
        self,
        dims: int,
        *,
        head_dim: int,
        hidden_dims: int,
        drop_path: float = 0.0,
        linear: LinearFactory = Linear,
    ):
        super().__init__()
        self.mixer = MultiScaleAttention(dims, head_dim=head_dim, linear=linear)
        self.bottleneck = InvertedBottleneck(
            dims,
            dims,
            hidden_dims=hidden_dims,
            has_inner_norms=False,
            is_residual=True,
            drop_path=drop_path,
            linear=linear,
        )
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.bottleneck(x + self.drop_path(self.mixer(x)))
        return y


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    stem, *widths = config.widths
    first = Convolution(config.input_channels, stem, 3, stride=2, bias=False, norm=BatchNorm(stem))
    embed = nn.Sequential(
        first,
        hardswish,
        *[InvertedBottleneck(stem, stem, is_residual=True) for _ in range(config.depths[0])],
    )
    inner, outer = config.head_widths
    # what follows the last stage still sees positions
    neck = nn.Sequential(
        Convolution(widths[-1], inner, 1, bias=False, norm=BatchNorm(inner)), hardswish
    )
    counts = [depth + (n >= _FIRST_WITH_ATTENTION) for n, depth in enumerate(config.depths[1:])]
    rates = drop_rates(config.drop_path_rate, counts)
    stages = [Stage(_blocks(config, n, rates[n])) for n in range(4)]
    head = nn.Sequential(
        Linear(inner, outer, bias=False),
        LayerNorm(outer, eps=1e-5),
        hardswish,
        config.class_head(outer),
    )
    return ImageClassifier(embed, stages, head, neck=neck, config=config)


def _blocks(config: Config, stage: int, rates: Sequence[float]) -> list[nn.Module]:
    """The first halves the map, and has no branch that training could leave out."""
    before, dims = config.widths[stage : stage + 2]
    ratio, has_attention = config.expand_ratio, stage >= _FIRST_WITH_ATTENTION

    def linear(index: int) -> LinearFactory:
        return config.linear(f"stages.{stage}.blocks.{index}")

    blocks: list[nn.Module] = [
        InvertedBottleneck(
            before,
            dims,
            hidden_dims=ratio * before,
            stride=2,
            has_inner_norms=not has_attention,
            linear=linear(0),
        )
    ]
    for index, rate in enumerate(rates[1:], 1):
        options: dict[str, Any] = {
            "hidden_dims": ratio * dims,
            "drop_path": rate,
            "linear": linear(index),
        }
        if has_attention:
            blocks.append(EfficientViTBlock(dims, head_dim=config.head_dim, **options))
        else:
            blocks.append(InvertedBottleneck(dims, dims, is_residual=True, **options))
    return blocks


def _bottleneck_names(theirs: str, ours: str) -> dict[str, str]:
    return {
        f"{theirs}.inverted_conv.conv": f"{ours}.up_proj.linear",
        f"{theirs}.inverted_conv.norm": f"{ours}.up_proj.norm",
        f"{theirs}.depth_conv.conv": f"{ours}.convolution",
        f"{theirs}.depth_conv.norm": f"{ours}.convolution.norm",
        f"{theirs}.point_conv.conv": f"{ours}.down_proj.linear",
        f"{theirs}.point_conv.norm": f"{ours}.down_proj.norm",
    }


_BLOCK = "stages.{}.blocks.{}"
_ATTENTION = {
    "qkv.conv": "qkv_proj",
    "aggreg.{}.0": "scales.{}.convolution",
    "aggreg.{}.1": "scales.{}",
    "proj.conv": "output_proj",
    "proj.norm": "output_norm",
}
_STEM: dict[str, str] = {}
for _n in range(_MOST_STEM_BLOCKS):
    _STEM |= _bottleneck_names(f"stem.res{_n}.main", f"embed.layers.{_n + 2}")

ARCHITECTURE = Architecture(
    name="efficientvit",
    config=Config,
    build=build,
    weight_names={
        "stem.in_conv.conv": "embed.layers.0.linear",
        "stem.in_conv.norm": "embed.layers.0.norm",
        **_STEM,
        **_bottleneck_names(f"{_BLOCK}.main", _BLOCK),
        **_bottleneck_names(f"{_BLOCK}.local_module.main", f"{_BLOCK}.bottleneck"),
        **{
            f"{_BLOCK}.context_module.main.{a}": f"{_BLOCK}.mixer.{b}"
            for a, b in _ATTENTION.items()
        },
        "head.in_conv.conv": "neck.layers.0.linear",
        "head.in_conv.norm": "neck.layers.0.norm",
        "head.classifier.0": "head.layers.0",
        "head.classifier.1": "head.layers.1",
        # their third layer is the activation and their fourth drops numbers in training
        "head.classifier.4": "head.layers.3",
    },
    tiny={
        "architecture": "efficientvit_b0",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
        "model_args": {
            "widths": [4, 6, 8, 8, 12],
            "depths": [1, 2, 1, 1, 1],
            "head_dim": 4,
            "head_widths": [16, 20],
        },
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

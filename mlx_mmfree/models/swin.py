"""Swin (Liu et al., arXiv 2103.14030), as in timm.

Where windows do not fit, maps are shifted and then padded, unlike in the original code.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers.feed_forward import FeedForward
from ..errors import CheckpointError
from ..layers.arguments import check_sizes
from ..layers.dense import Linear
from ..layers.maps import Convolution
from ..layers.norms import LayerNorm
from ..spatial_mixers.window_attention import WindowAttention
from .parts.architecture import Architecture, Published, draw_weights
from .parts.fields import boolean, integer, integers, key, number
from .parts.image_classifier import ImageBlock, ImageClassifier, ImageConfig, Stage, drop_rates

_NORM = partial(LayerNorm, eps=1e-5)


class PatchMerging(nn.Module):
    r"""Four neighbouring positions become one with other dims.

    .. math::
        y_{ij} = W\,\mathrm{LN}\big([x_{2i,2j} \,|\, x_{2i+1,2j} \,|\, x_{2i,2j+1} \,|\,
        x_{2i+1,2j+1}]\big)

    A map with an odd number of rows or columns is padded with zeros.

    Args:
        dims: Dims `D`.
        output_dims: Dims of the result. Default: `2 * dims`.

    Shape:
        `x`: `(B, H, W, D)`; `y`: `(B, H / 2, W / 2, output_dims)`, rounded up.

    Example:
        >>> PatchMerging(8)(mx.zeros((1, 5, 4, 8))).shape
        (1, 3, 2, 16)
    """

    def __init__(self, dims: int, *, output_dims: int | None = None):
        super().__init__()
        output_dims = 2 * dims if output_dims is None else output_dims
        check_sizes("PatchMerging", dims=dims, output_dims=output_dims)
        self.norm = _NORM(4 * dims)
        self.reduction = Linear(4 * dims, output_dims, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        height, width = x.shape[1:3]
        if height % 2 or width % 2:
            x = mx.pad(x, [(0, 0), (0, height % 2), (0, width % 2), (0, 0)])
        parts = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
        y: mx.array = self.reduction(self.norm(mx.concatenate(parts, axis=-1)))
        return y


_TINY = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
_SMALL = {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)}
_BASE = {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)}
_LARGE = {"embed_dim": 192, "depths": (2, 2, 18, 2), "num_heads": (6, 12, 24, 48)}


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one Swin."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "swin_tiny_patch4_window7_224": _TINY,
        "swin_small_patch4_window7_224": _SMALL,
        "swin_base_patch4_window7_224": _BASE,
        "swin_base_patch4_window12_384": {**_BASE, "window_size": 12},
        "swin_large_patch4_window7_224": _LARGE,
        "swin_large_patch4_window12_384": {**_LARGE, "window_size": 12},
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "head_dim": None,
        "always_partition": False,
        "strict_img_size": True,
        "dynamic_img_size": False,
    }

    patch_size: int = key("Side of a patch.", integer, 4, high=2**10)
    window_size: int = key(
        "Side of a window; a map that is smaller has one window.", integer, 7, high=2**10
    )
    embed_dim: int = key(
        "Dims of the first stage; each further one has twice as many.", integer, 96, high=2**12
    )
    depths: tuple[int, ...] = key("Blocks of each stage.", integers, (2, 2, 6, 2), high=512)
    num_heads: tuple[int, ...] = key("Heads of each stage.", integers, (3, 6, 12, 24), high=2**12)
    mlp_ratio: float = key("Width of the channel mixer, in dims.", number, 4.0, low=1e-3, high=64.0)
    qkv_bias: bool = key("Whether queries, keys and values have a bias.", boolean, True)

    def __post_init__(self) -> None:
        count = len(self.depths)
        heads = integers({"num_heads": list(self.num_heads)}, "num_heads", count=count, high=2**12)
        for stage, count in enumerate(heads):
            if self.dims_of(stage) % count:
                raise CheckpointError(
                    f"[config.json] 'num_heads' must divide the {self.dims_of(stage)} dims of stage "
                    f"{stage} but got {count}."
                )

    @property
    def num_features(self) -> int:
        return self.dims_of(len(self.depths) - 1)

    def dims_of(self, stage: int) -> int:
        """Dims of a stage."""
        return self.embed_dim * 2**stage

    def map_of(self, stage: int) -> tuple[int, int]:
        """Rows and columns of the map of a stage, for images of the model's size."""
        height, width = (side // self.patch_size for side in self.image_size)
        return -(-height // 2**stage), -(-width // 2**stage)


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant.

    Raises:
        CheckpointError: Images are smaller than a patch.
    """
    if 0 in config.map_of(0):
        raise CheckpointError(
            f"[config.json] 'img_size' must be at least 'patch_size', {config.patch_size}, but got "
            f"{list(config.image_size)}."
        )
    side = config.patch_size
    embed = nn.Sequential(
        Convolution(config.input_channels, config.embed_dim, side, stride=side),
        _NORM(config.embed_dim),
    )
    rates = drop_rates(config.drop_path_rate, config.depths)
    stages = [draw_weights(_stage(config, n, rates[n]), 0.02) for n in range(len(rates))]
    merges = [PatchMerging(config.dims_of(n)) for n in range(len(rates) - 1)]
    head = config.class_head(config.num_features)
    neck = _NORM(config.num_features)
    return ImageClassifier(embed, stages, head, merges=merges, neck=neck, config=config)


def _stage(config: Config, stage: int, rates: list[float]) -> Stage:
    blocks = [
        _block(config, stage, is_shifted=number % 2 == 1, drop_path=rate)
        for number, rate in enumerate(rates)
    ]
    return Stage(blocks)


def _block(config: Config, stage: int, *, is_shifted: bool, drop_path: float) -> ImageBlock:
    dims, (height, width) = config.dims_of(stage), config.map_of(stage)
    window = min(config.window_size, height), min(config.window_size, width)
    mixer = WindowAttention(
        dims,
        window=window,
        shift=config.window_size // 2 if is_shifted and config.window_size <= max(window) else 0,
        pads_first=False,
        num_heads=config.num_heads[stage],
        linear=config.linear("blocks.attn"),
        is_stacked=True,
        bias=config.qkv_bias,
    )
    channel_mixer = FeedForward(
        dims,
        hidden_dims=int(dims * config.mlp_ratio),
        linear=config.linear("blocks.mlp"),
        activation="gelu",
    )
    return ImageBlock(dims, mixer, channel_mixer, norm=_NORM, drop_path=drop_path)


def _newer_name(name: str, names: Collection[str]) -> str:
    """Before its version 0.9, timm merged patches at the end of a stage, as Microsoft's files do."""
    found = re.fullmatch(r"layers\.([0-9]{1,3})\.downsample\.(.+)", name)
    if found and "layers.0.downsample.norm.weight" in names:
        return f"layers.{int(found[1]) + 1}.downsample.{found[2]}"
    return {"head.weight": "head.fc.weight", "head.bias": "head.fc.bias"}.get(name, name)


ARCHITECTURE = Architecture(
    name="swin",
    newer_name=_newer_name,
    config=Config,
    build=build,
    weight_names={
        "patch_embed.proj": "embed.layers.0.linear",
        "patch_embed.norm": "embed.layers.1",
        **{f"layers.{n + 1}.downsample": f"merges.{n}" for n in range(15)},
        "layers.{}.blocks.{}.norm1": "stages.{}.blocks.{}.mixer_norm",
        "layers.{}.blocks.{}.attn.qkv": "stages.{}.blocks.{}.mixer.qkv_proj",
        "layers.{}.blocks.{}.attn.proj": "stages.{}.blocks.{}.mixer.output_proj",
        "layers.{}.blocks.{}.attn.relative_position_bias_table": (
            "stages.{}.blocks.{}.mixer.position_table"
        ),
        # a constant, which older files hold
        "layers.{}.blocks.{}.attn.relative_position_index": None,
        "layers.{}.blocks.{}.attn_mask": None,
        "layers.{}.blocks.{}.norm2": "stages.{}.blocks.{}.channel_norm",
        "layers.{}.blocks.{}.mlp.fc1": "stages.{}.blocks.{}.channel_mixer.up_proj",
        "layers.{}.blocks.{}.mlp.fc2": "stages.{}.blocks.{}.channel_mixer.down_proj",
        "norm": "neck",
        "head.fc": "head",
    },
    tiny={
        "architecture": "swin_tiny_patch4_window7_224",
        "num_classes": 5,
        "model_args": {
            "img_size": [22, 18],
            "patch_size": 2,
            "window_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [1, 2],
        },
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

"""EdgeNeXt (Maaz et al., arXiv 2206.10589): convolutions, and here and there channel attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..channel_mixers import FeedForward
from ..errors import CheckpointError
from ..layers.arguments import check_counts, check_sizes
from ..layers.dense import Linear
from ..layers.maps import Convolution, DepthwiseBlock, DepthwiseConvolution, DropPath, LayerScale
from ..layers.matrix import StoredLayout
from ..layers.norms import LayerNorm
from ..spatial_mixers.cross_covariance_attention import CrossCovarianceAttention
from .parts.architecture import Architecture, Published, draw_weights
from .parts.fields import integers, key
from .parts.image_classifier import ImageClassifier, ImageConfig, staged


class FourierPositions(nn.Module):
    r"""Adds a linear map of sines and cosines of the row and the column.

    .. math::
        y_{ij} &= x_{ij} + W\,\Big[\phi\Big(2 \pi\,\frac{i + 1}{H + \epsilon}\Big) \,\Big|\,
        \phi\Big(2 \pi\,\frac{j + 1}{W + \epsilon}\Big)\Big] + b \\
        \phi(a)_{2n} &= \sin(a\,\theta^{-2n/F}), \; \phi(a)_{2n+1} = \cos(a\,\theta^{-2n/F})

    with :math:`\theta` = 10,000 and :math:`\epsilon = 10^{-6}`.

    Args:
        dims: Dims `D` of a map.
        num_features: Numbers `F` for each axis, an even number.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        ValueError: The number of features is odd.

    Example:
        >>> FourierPositions(8)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(self, dims: int, *, num_features: int = 32):
        super().__init__()
        check_sizes("FourierPositions", dims=dims, num_features=num_features)
        if num_features % 2:
            raise ValueError(
                f"[FourierPositions] 'num_features' must be even but got {num_features}."
            )
        self._features = num_features
        self._dims = dims
        self.token_proj = Linear(2 * num_features, dims)

    @property
    def stored_layouts(self) -> dict[str, StoredLayout]:
        layout = StoredLayout.convolution(self._dims, 2 * self._features, 1)
        return {"token_proj.weight": layout}

    def __call__(self, x: mx.array) -> mx.array:
        height, width = x.shape[1:3]
        rows = np.broadcast_to(self._codes(height)[:, None], (height, width, self._features))
        columns = np.broadcast_to(self._codes(width)[None], (height, width, self._features))
        codes = mx.array(np.concatenate([rows, columns], axis=-1).astype(np.float32))
        return x + self.token_proj(codes.astype(x.dtype))

    def _codes(self, count: int) -> np.ndarray:
        """Codes of an axis, `(count, F)`; in float64, since angles are large."""
        position = np.arange(1, count + 1) / (count + 1e-6) * 2 * math.pi
        wave = 10000.0 ** (-2 * (np.arange(self._features) // 2) / self._features)
        angles = position[:, None] * wave
        even = np.arange(self._features) % 2 == 0
        return np.where(even, np.sin(angles), np.cos(angles))


class SplitConvolution(nn.Module):
    r"""Each group of channels is convolved together with what the group before it became.

    .. math::
        s_0 = \mathrm{conv}_0(x_0), \quad s_i = \mathrm{conv}_i(s_{i-1} + x_i), \quad
        y = [s_0, \dots, s_{n-1}, x_n]

    with depthwise convolutions of 3 x 3 positions and groups of :math:`\lceil D / (n + 1) \rceil`
    channels, of which the last may be smaller and stays as it is.

    Args:
        dims: Channels `D`.
        num_convolutions: `n`; 0: nothing is changed.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Raises:
        ValueError: There are fewer groups of that size than there must be.

    Example:
        >>> SplitConvolution(8, 1)(mx.zeros((1, 5, 4, 8))).shape
        (1, 5, 4, 8)
    """

    def __init__(self, dims: int, num_convolutions: int):
        super().__init__()
        check_sizes("SplitConvolution", dims=dims)
        check_counts("SplitConvolution", num_convolutions=num_convolutions)
        self._width = -(-dims // (num_convolutions + 1))
        if self._width * num_convolutions >= dims:
            raise ValueError(
                f"[SplitConvolution] 'num_convolutions' must leave channels for a last group but got "
                f"{num_convolutions} for {dims} dims."
            )
        self.convolutions = [DepthwiseConvolution(self._width, 3) for _ in range(num_convolutions)]

    def __call__(self, x: mx.array) -> mx.array:
        width = self._width
        parts: list[mx.array] = []
        for n, convolve in enumerate(self.convolutions):
            part = x[..., n * width : (n + 1) * width]
            parts.append(convolve(part + parts[-1] if parts else part))
        parts.append(x[..., len(parts) * width :])
        return mx.concatenate(parts, axis=-1)


_NORM = partial(LayerNorm, eps=1e-6)
_SCALE = partial(LayerScale, initial=1e-6)
_KERNELS = (3, 5, 7, 9)
"""Sides of the windows of each stage."""
_CONVOLUTIONS = (0, 1, 2, 3)
"""Convolutions in the last block of each stage, which has attention; the first stage has none."""
_STAGE_WITH_POSITIONS = 1


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one EdgeNeXt."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "edgenext_xx_small": {
            "dims": (24, 48, 88, 168),
            "depths": (2, 2, 6, 2),
            "heads": (4, 4, 4, 4),
        },
        "edgenext_x_small": {
            "dims": (32, 64, 100, 192),
            "depths": (3, 3, 9, 3),
            "heads": (4, 4, 4, 4),
        },
        "edgenext_small": {
            "dims": (48, 96, 160, 304),
            "depths": (3, 3, 9, 3),
            "heads": (8, 8, 8, 8),
        },
        "edgenext_base": {
            "dims": (80, 160, 288, 584),
            "depths": (3, 3, 9, 3),
            "heads": (8, 8, 8, 8),
        },
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "global_block_counts": [0, 1, 1, 1],
        "kernel_sizes": [3, 5, 7, 9],
        "d2_scales": [2, 2, 3, 4],
        "use_pos_emb": [False, True, False, False],
        "expand_ratio": 4,
        "downsample_block": False,
        "conv_bias": True,
        "stem_type": "patch",
        "head_norm_first": False,
    }
    has_fixed_size: ClassVar[bool] = False

    dims: tuple[int, ...] = key(
        "Dims of each of the four stages.", integers, (), count=4, high=2**14
    )
    depths: tuple[int, ...] = key("Blocks of each.", integers, (), count=4, high=512)
    heads: tuple[int, ...] = key("Heads of attention in each.", integers, (), count=4, high=2**10)

    def __post_init__(self) -> None:
        dims, heads = self.dims, self.heads
        if any(width % count for width, count in zip(dims[1:], heads[1:], strict=True)):
            raise CheckpointError(
                f"[config.json] 'heads' must divide 'dims', {list(dims)}, but got {list(heads)}."
            )
        for width, count in zip(dims, _CONVOLUTIONS, strict=True):
            # the last group of channels has what the others leave
            if -(-width // (count + 1)) * count >= width:
                raise CheckpointError(
                    f"[config.json] 'dims' must leave channels for {count + 1} groups in each stage but "
                    f"got {list(dims)}."
                )

    @property
    def num_features(self) -> int:
        return self.dims[-1]


class SplitTransposeBlock(nn.Module):
    r"""Convolutions of growing reach, attention between channels, then a feed-forward.

    .. math::
        u &= \mathrm{positions}(\mathrm{conv}(x)), \quad
        v = u + \mathrm{drop}\big(\gamma_1 \odot \mathrm{XCA}(\mathrm{LN}(u))\big) \\
        y &= x + \mathrm{drop}\big(\gamma_2 \odot \mathrm{FeedForward}(\mathrm{LN}(v))\big)

    Args:
        dims: Dims `D`.
        mixer: The attention.
        channel_mixer: The feed-forward.
        num_convolutions: Those of `SplitConvolution`.
        has_positions: Whether there are positions.
        drop_path: Probability that training leaves a branch out for a sample.

    Shape:
        `x` and `y`: `(B, H, W, D)`.
    """

    def __init__(
        self,
        dims: int,
        mixer: CrossCovarianceAttention,
        channel_mixer: FeedForward,
        *,
        num_convolutions: int,
        has_positions: bool = False,
        drop_path: float = 0.0,
    ):
        super().__init__()
        self.convolution = SplitConvolution(dims, num_convolutions)
        self.positions = FourierPositions(dims) if has_positions else nn.Identity()
        self.mixer_norm = _NORM(dims)
        self.mixer = mixer
        self.mixer_scale = _SCALE(dims)
        self.norm = _NORM(dims)
        self.channel_mixer = channel_mixer
        self.channel_scale = _SCALE(dims)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        u = self.positions(self.convolution(x))
        u = u + self.drop_path(self.mixer_scale(self.mixer(self.mixer_norm(u))))
        y = self.channel_scale(self.channel_mixer(self.norm(u)))
        return x + self.drop_path(y).astype(x.dtype)


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    dims = config.dims
    embed = nn.Sequential(Convolution(config.input_channels, dims[0], 4, stride=4), _NORM(dims[0]))
    merges = [
        nn.Sequential(_NORM(before), Convolution(before, after, 2, stride=2))
        for before, after in pairwise(dims)
    ]
    stages = staged(config.drop_path_rate, config.depths, partial(_block, config))
    head = nn.Sequential(_NORM(dims[-1]), config.class_head(dims[-1]))
    return draw_weights(ImageClassifier(embed, stages, head, merges=merges, config=config), 0.02)


def _block(config: Config, stage: int, index: int, drop_path: float) -> nn.Module:
    dims, name = config.dims[stage], f"stages.{stage}.blocks.{index}"
    channel_mixer = FeedForward(dims, linear=config.linear(f"{name}.mlp"), activation="gelu")
    if stage == 0 or index < config.depths[stage] - 1:
        return DepthwiseBlock(
            DepthwiseConvolution(dims, _KERNELS[stage]),
            channel_mixer,
            norm=_NORM(dims),
            scale=_SCALE(dims),
            drop_path=drop_path,
        )
    mixer = CrossCovarianceAttention(
        dims,
        num_heads=config.heads[stage],
        linear=config.linear(f"{name}.xca"),
        is_stacked=True,
    )
    return SplitTransposeBlock(
        dims,
        mixer,
        channel_mixer,
        num_convolutions=_CONVOLUTIONS[stage],
        has_positions=stage == _STAGE_WITH_POSITIONS,
        drop_path=drop_path,
    )


_IN_BLOCK = {
    "conv_dw": "convolution",
    "convs": "convolution.convolutions",
    "pos_embd.token_projection": "positions.token_proj",
    "norm_xca": "mixer_norm",
    "xca": "mixer",
    "xca.qkv": "mixer.qkv_proj",
    "xca.proj": "mixer.output_proj",
    "gamma_xca": "mixer_scale.weight",
    "norm": "norm",
    "mlp.fc1": "channel_mixer.up_proj",
    "mlp.fc2": "channel_mixer.down_proj",
    "gamma": "channel_scale.weight",
}

ARCHITECTURE = Architecture(
    name="edgenext",
    config=Config,
    build=build,
    weight_names={
        "stem.0": "embed.layers.0.linear",
        "stem.1": "embed.layers.1",
        **{f"stages.{n}.downsample.0": f"merges.{n - 1}.layers.0" for n in range(1, 4)},
        **{f"stages.{n}.downsample.1": f"merges.{n - 1}.layers.1.linear" for n in range(1, 4)},
        **{
            f"stages.{{}}.blocks.{{}}.{a}": f"stages.{{}}.blocks.{{}}.{b}"
            for a, b in _IN_BLOCK.items()
        },
        "head.norm": "head.layers.0",
        "head.fc": "head.layers.1",
    },
    tiny={
        "architecture": "edgenext_xx_small",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 32, 32]},
        "model_args": {
            "dims": [8, 16, 24, 32],
            "depths": [1, 2, 1, 1],
            "heads": [2, 2, 2, 2],
        },
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

"""PoolFormer (Yu et al., arXiv 2111.11418): positions are mixed by means of neighbours alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..layers.arguments import check_sizes
from ..layers.maps import Convolution, pointwise
from ..layers.norms import LayerNorm
from ..ops import long_sum
from ..spatial_mixers.spatial_pooling import SpatialPooling
from .parts.architecture import Architecture, Published, draw_weights
from .parts.fields import integers, key
from .parts.image_classifier import ImageBlock, ImageClassifier, ImageConfig, staged


class MapNorm(nn.Module):
    r"""Every map gets the mean 0 and the variance 1 over all its numbers, then a scale and a shift.

    .. math::
        y_{p,c} = \frac{x_{p,c} - \mu}{\sqrt{\sigma^2 + \epsilon}}\,\gamma_c + \beta_c

    It is the group norm (Wu and He, arXiv 1803.08494) with one group. Unlike MLX's own, it adds its long
    sums block by block.

    Args:
        dims: Channels `D`.
        eps: :math:`\epsilon`.

    Shape:
        `x` and `y`: `(B, H, W, D)`.

    Example:
        >>> MapNorm(8)(mx.zeros((2, 5, 4, 8))).shape
        (2, 5, 4, 8)
    """

    def __init__(self, dims: int, *, eps: float = 1e-5):
        super().__init__()
        check_sizes("MapNorm", dims=dims)
        self._eps = eps
        self.weight = mx.ones((dims,))
        self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        numbers = x.reshape(x.shape[0], -1).astype(mx.float32)
        mean = _mean(numbers)
        centred = numbers - mean
        scale = mx.rsqrt(_mean(centred.square()) + self._eps)[..., None, None]
        y = centred.reshape(x.shape) * (scale * self.weight.astype(mx.float32))
        return (y + self.bias.astype(mx.float32)).astype(x.dtype)


def _mean(rows: mx.array) -> mx.array:
    """That of each row, `(B, 1)`."""
    return long_sum(rows, axis=-1)[:, None] / rows.shape[1]


_SMALL = (64, 128, 320, 512)
_MIDDLE = (96, 192, 384, 768)


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one PoolFormer."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "poolformer_s12": {"dims": _SMALL, "depths": (2, 2, 6, 2)},
        "poolformer_s24": {"dims": _SMALL, "depths": (4, 4, 12, 4)},
        "poolformer_s36": {"dims": _SMALL, "depths": (6, 6, 18, 6)},
        "poolformer_m36": {"dims": _MIDDLE, "depths": (6, 6, 18, 6)},
        "poolformer_m48": {"dims": _MIDDLE, "depths": (8, 8, 24, 8)},
    }
    usual: ClassVar[Mapping[str, Any]] = {
        "downsample_norm": None,
        "mlp_bias": True,
        "res_scale_init_values": None,
        "use_mlp_head": False,
    }
    has_fixed_size: ClassVar[bool] = False

    dims: tuple[int, ...] = key(
        "Dims of each of the four stages.", integers, (), count=4, high=2**14
    )
    depths: tuple[int, ...] = key("Blocks of each.", integers, (), count=4, high=512)

    @property
    def num_features(self) -> int:
        return self.dims[-1]


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant."""
    dims = config.dims
    embed = Convolution(config.input_channels, dims[0], 7, stride=4, padding=2)
    stages = staged(config.drop_path_rate, config.depths, partial(_block, config))
    # a stage of the same dims goes on with the same positions
    merges = [
        None if before == after else Convolution(before, after, 3, stride=2)
        for before, after in pairwise(dims)
    ]
    head = nn.Sequential(LayerNorm(dims[-1], eps=1e-6), config.class_head(dims[-1]))
    return draw_weights(ImageClassifier(embed, stages, head, merges=merges, config=config), 0.02)


def _block(config: Config, stage: int, index: int, drop_path: float) -> ImageBlock:
    dims = config.dims[stage]
    linear = pointwise(config.linear(f"stages.{stage}.blocks.{index}.mlp"))
    return ImageBlock(
        dims,
        SpatialPooling(dims),
        FeedForward(dims, linear=linear, activation="gelu"),
        norm=partial(MapNorm, eps=1e-5),
        layer_scale=1e-5,
        drop_path=drop_path,
    )


ARCHITECTURE = Architecture(
    name="poolformer",
    config=Config,
    build=build,
    weight_names={
        "stem.conv": "embed.linear",
        **{f"stages.{n}.downsample.conv": f"merges.{n - 1}.linear" for n in range(1, 4)},
        "stages.{}.blocks.{}.norm1": "stages.{}.blocks.{}.mixer_norm",
        "stages.{}.blocks.{}.layer_scale1.scale": "stages.{}.blocks.{}.mixer_scale.weight",
        "stages.{}.blocks.{}.norm2": "stages.{}.blocks.{}.channel_norm",
        "stages.{}.blocks.{}.mlp.fc1": "stages.{}.blocks.{}.channel_mixer.up_proj.linear",
        "stages.{}.blocks.{}.mlp.fc2": "stages.{}.blocks.{}.channel_mixer.down_proj.linear",
        "stages.{}.blocks.{}.layer_scale2.scale": "stages.{}.blocks.{}.channel_scale.weight",
        "head.norm": "head.layers.0",
        "head.fc": "head.layers.1",
    },
    tiny={
        "architecture": "poolformer_s12",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 64, 64]},
        "model_args": {"dims": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)

"""A causal architecture: its description, how it is built, and what its tensors are called on disk."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import mlx.nn as nn

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.models.parts.architecture import Architecture, draw_weights
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.fields import HubConfig, integer, key
from mlx_mmfree.models.parts.stack import Decoder
from mlx_mmfree.token_mixers import MLGRU


@dataclass(frozen=True)
class Config(HubConfig):
    """The sizes of one model, read from `config.json` and written back to it."""

    model_type: ClassVar[str] = "two_gates"
    hub_class: ClassVar[str] = "TwoGates"

    vocab_size: int = key("Number of tokens.", integer, high=2**24)
    width: int = key("Model dims.", integer, high=2**17)
    depth: int = key("Number of blocks.", integer, high=1024)


def build(config: Config) -> Decoder:
    dims = config.width
    linear = partial(BitLinear, norm_eps=1e-6)
    blocks = [
        Block(dims, MLGRU(dims, linear=linear), SwiGLU(dims, hidden_dims=2 * dims, linear=linear))
        for _ in range(config.depth)
    ]
    embed = nn.Embedding(config.vocab_size, dims)
    return draw_weights(Decoder(embed, blocks, nn.RMSNorm(dims), None, config), 0.3)


# what this record leaves out, such as a name in GGUF, is refused where a command asks for it
ARCHITECTURE = Architecture(
    name="two_gates",
    config=Config,
    build=build,
    weight_names={
        "tokens": "embed",
        "layers.{}.norm_1.weight": "blocks.{}.token_norm.weight",
        "layers.{}.mix": "blocks.{}.token_mixer",
        "layers.{}.norm_2.weight": "blocks.{}.channel_norm.weight",
        "layers.{}.feed": "blocks.{}.channel_mixer",
        "last_norm.weight": "norm.weight",
    },
    tiny={"vocab_size": 518, "width": 32, "depth": 2},
)

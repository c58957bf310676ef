"""An encoder: every position sees the whole text, and the head fills in what is left out."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import mlx.nn as nn

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear, RoPE
from mlx_mmfree.models.parts.architecture import Architecture, draw_weights
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.encoders import MaskedLM
from mlx_mmfree.models.parts.fields import HubConfig, integer, key
from mlx_mmfree.token_mixers import GQA


@dataclass(frozen=True)
class Config(HubConfig):
    """The sizes of one model, read from `config.json` and written back to it."""

    model_type: ClassVar[str] = "fill_in"
    hub_class: ClassVar[str] = "FillIn"

    vocab_size: int = key("Number of tokens.", integer, high=2**24)
    width: int = key("Model dims.", integer, high=2**17)
    heads: int = key("Heads of attention.", integer, high=2**12)


def build(config: Config) -> MaskedLM:
    dims, linear = config.width, partial(BitLinear, norm_eps=1e-6)
    attention = GQA(
        dims,
        num_heads=config.heads,
        linear=linear,
        rope=RoPE(dims // config.heads),
        is_causal=False,
    )
    blocks = [Block(dims, attention, SwiGLU(dims, hidden_dims=2 * dims, linear=linear))]
    embed = nn.Embedding(config.vocab_size, dims)
    return draw_weights(MaskedLM(embed, blocks, nn.RMSNorm(dims), None, config), 0.3)


ARCHITECTURE = Architecture(
    name="fill_in",
    config=Config,
    build=build,
    weight_names={
        "tokens": "embed",
        "layers.{}": "blocks.{}",
        "last_norm.weight": "norm.weight",
    },
    tiny={"vocab_size": 518, "width": 32, "heads": 4},
)

"""An encoder: every position sees the whole text, and the head fills in what is left out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import mlx.nn as nn

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers import BitLinear, RoPE
from mlx_mmfree.models.parts.architecture import Architecture
from mlx_mmfree.models.parts.block import Block
from mlx_mmfree.models.parts.fields import integer
from mlx_mmfree.models.parts.initialization import draw_weights
from mlx_mmfree.models.parts.masked_lm import MaskedLM
from mlx_mmfree.token_mixers import GQA


@dataclass(frozen=True)
class Config:
    """The sizes of one model, read from `config.json` and written back to it."""

    vocab_size: int
    width: int
    heads: int

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "Config":
        return cls(
            integer(config, "vocab_size", high=2**24),
            integer(config, "width", high=2**17),
            integer(config, "heads", high=2**12),
        )

    def to_hub(self) -> dict[str, Any]:
        return {"model_type": "fill_in", **asdict(self)}


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

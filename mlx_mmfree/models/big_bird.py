"""Big Bird (Zaheer et al., arXiv 2007.14062): an encoder with near, global and random blocks.

Random blocks are those of transformers, which in evaluation takes block 0 for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UnsupportedModelError
from ..layers.mixer import TokenMixer
from ..token_mixers.big_bird import BigBird
from ..token_mixers.multi_head_attention import MultiHeadAttention
from .parts.architecture import Architecture
from .parts.bert import (
    ATTENTION_NAMES,
    HEAD_NAMES,
    TINY,
    Bert,
    BertConfig,
    Front,
    heads_of,
    weight_names,
)
from .parts.fields import boolean, integer, refuse_unless

_KINDS = ("block_sparse", "original_full")


@dataclass(frozen=True)
class Config(BertConfig):
    """The description of one Big Bird.

    Attributes: as `BertConfig`, and
        num_attention_heads: Heads.
        attention_type: `block_sparse`, or `original_full` for attention to all tokens.
        block_size: Tokens of a block.
        num_random_blocks: Random blocks that a block sees.
        rescale_embeddings: Embedded tokens are multiplied by the root of the dims.
    """

    model_type: ClassVar[str] = "big_bird"
    architecture: ClassVar[str] = "BigBirdForMaskedLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        **BertConfig.defaults,
        "vocab_size": 50358,
        "max_position_embeddings": 4096,
        "attention_type": "block_sparse",
        "block_size": 64,
        "num_random_blocks": 3,
        "rescale_embeddings": False,
    }

    num_attention_heads: int = 12
    attention_type: str = "block_sparse"
    block_size: int = 64
    num_random_blocks: int = 3
    rescale_embeddings: bool = False

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        kind = config["attention_type"]
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"[config.json] 'attention_type' must be {' or '.join(_KINDS)} but got {kind!r:.100}."
            )
        refuse_unless(config, {"use_bias": True})
        fields = super().read_fields(config)
        return fields | {
            "num_attention_heads": heads_of(config, fields["hidden_size"]),
            "attention_type": kind,
            "block_size": integer(config, "block_size", high=2**16),
            "num_random_blocks": integer(config, "num_random_blocks", low=0, high=2**10),
            "rescale_embeddings": boolean(config, "rescale_embeddings"),
        }


def build(config: Config) -> Bert:
    """A model with fresh weights."""
    dims, heads = config.hidden_size, config.num_attention_heads

    def mixer() -> TokenMixer:
        if config.attention_type == "original_full":
            return MultiHeadAttention(dims, num_heads=heads, bias=True, is_causal=False)
        return BigBird(
            dims,
            block_size=config.block_size,
            num_random=config.num_random_blocks,
            plan="released",
            num_heads=heads,
            bias=True,
        )

    front = Front(config, scale=dims**0.5 if config.rescale_embeddings else 1.0)
    return Bert(config, front, [mixer() for _ in range(config.num_hidden_layers)])


ARCHITECTURE = Architecture(
    name="big_bird",
    config=Config,
    build=build,
    weight_names={**weight_names("bert", ATTENTION_NAMES), **HEAD_NAMES},
    does=lambda config: "fill-mask",
    tiny={**TINY, "num_attention_heads": 4, "block_size": 2, "num_random_blocks": 1},
)

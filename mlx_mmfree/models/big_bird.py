"""Big Bird (Zaheer et al., arXiv 2007.14062): an encoder with near, global and random blocks.

Random blocks are chosen as in transformers, which in evaluation takes block 0 for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..layers.mixer import TokenMixer
from ..token_mixers.big_bird import BigBird
from ..token_mixers.multi_head_attention import MultiHeadAttention
from .parts import bert
from .parts.architecture import Architecture, Published
from .parts.fields import boolean, integer, key, word


@dataclass(frozen=True)
class Config(bert.AttentionConfig):
    """The description of one Big Bird."""

    model_type: ClassVar[str] = "big_bird"
    hub_class: ClassVar[str] = "BigBirdForMaskedLM"
    fixed: ClassVar[Mapping[str, Any]] = {**bert.BertConfig.fixed, "use_bias": True}

    vocab_size: int = 50358
    max_position_embeddings: int = 4096
    attention_type: str = key(
        "`block_sparse`, or `original_full` for attention to all tokens.",
        word,
        "block_sparse",
        among=("block_sparse", "original_full"),
    )
    block_size: int = key("Tokens of a block.", integer, 64, high=2**16)
    num_random_blocks: int = key("Random blocks that a block sees.", integer, 3, low=0, high=2**10)
    rescale_embeddings: bool = key(
        "Embedded tokens are multiplied by the root of the dims.", boolean, False
    )


def build(config: Config) -> bert.Bert:
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

    front = bert.Front(config, scale=dims**0.5 if config.rescale_embeddings else 1.0)
    return bert.Bert(config, front, [mixer() for _ in range(config.num_hidden_layers)])


ARCHITECTURE = Architecture(
    name="big_bird",
    config=Config,
    build=build,
    weight_names={**bert.weight_names("bert", bert.ATTENTION_NAMES), **bert.HEAD_NAMES},
    does=lambda config: "fill-mask",
    tiny={**bert.TINY, "num_attention_heads": 4, "block_size": 2, "num_random_blocks": 1},
    published={"google/bigbird-roberta-{base,large}": Published("float32", "transformers")},
)

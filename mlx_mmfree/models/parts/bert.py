"""Encoders in the form of BERT (Devlin et al., arXiv 1810.04805), whatever their token mixer is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ...channel_mixers import FeedForward
from ...channel_mixers.feed_forward import FUNCTIONS
from ...errors import CheckpointError
from ...layers import apply_head
from ...layers.attention.positions import LearnedPositions
from ...layers.context import Context, count_on
from ...layers.mixer import TokenMixer
from .architecture import Copy
from .block import Block
from .fields import ACTIVATIONS, activation, integer, number, refuse_unless
from .initialization import draw_weights
from .masked_lm import MaskedLM
from .tokens import known_rows

TINY: Mapping[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class BertConfig:
    """The description of one encoder.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Model dims D.
        num_hidden_layers: Number of blocks.
        intermediate_size: Width of the channel mixer.
        hidden_act: Its activation, and that of the head.
        max_position_embeddings: Rows of the table of positions.
        type_vocab_size: Rows of the table of segments, of which the first is used.
        layer_norm_eps: Epsilon of the norms.
        initializer_range: Standard deviation of freshly made weights.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
    }
    """What transformers takes for keys that a `config.json` leaves out."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        return cls(**cls.read_fields({**cls.defaults, **config}))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that all encoders have, of a configuration with every key."""
        refuse_unless(config, {"tie_word_embeddings": True, "is_decoder": False})
        return {
            "vocab_size": integer(config, "vocab_size", high=2**24),
            "hidden_size": integer(config, "hidden_size", high=2**17),
            "num_hidden_layers": integer(config, "num_hidden_layers", high=1024),
            "intermediate_size": integer(config, "intermediate_size"),
            "hidden_act": activation(config, "hidden_act", FUNCTIONS, cls.defaults["hidden_act"]),
            "max_position_embeddings": integer(config, "max_position_embeddings", high=2**20),
            "type_vocab_size": integer(config, "type_vocab_size", high=2**10),
            "layer_norm_eps": number(config, "layer_norm_eps", low=1e-15, high=1.0),
            "initializer_range": number(config, "initializer_range", low=0.0, high=10.0),
        }

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this architecture, read back by `from_hub`."""
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "tie_word_embeddings": True,
            **asdict(self),
        }


class Front(nn.Module):
    """What comes before the first block: positions and the first segment are added, then normed.

    Args:
        config: The encoder.
        offset: Row of position 0.
        scale: What embedded tokens are multiplied by.
        has_projection: A linear layer follows the norm.
    """

    def __init__(
        self,
        config: BertConfig,
        *,
        offset: int = 0,
        scale: float = 1.0,
        has_projection: bool = False,
    ):
        super().__init__()
        dims, rows = config.hidden_size, config.max_position_embeddings
        self._scale = scale
        self.positions = LearnedPositions(dims, max_length=rows - offset, offset=offset)
        self.segments = nn.Embedding(config.type_vocab_size, dims)
        self.norm = nn.LayerNorm(dims, eps=config.layer_norm_eps)
        if has_projection:
            self.projection = nn.Linear(dims, dims)

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        places, _ = count_on(mx.zeros((x.shape[0],), mx.int32), x.shape[1], context)
        x = self.norm(x * self._scale + self.positions(places) + self.segments.weight[0])
        return self.projection(x) if "projection" in self else x


class Bert(MaskedLM):
    r"""A masked language model with a table of positions, and a layer before its tied head.

    .. math::
        \mathrm{logits} = E\,\mathrm{LN}(a(W h + b)) + c

    Args:
        config: The encoder.
        front: What comes before the first block.
        mixers: The token mixer of each block.
    """

    def __init__(self, config: BertConfig, front: Front, mixers: list[TokenMixer]):
        dims, eps = config.hidden_size, config.layer_norm_eps
        blocks = [
            Block(
                dims,
                mixer,
                FeedForward(
                    dims,
                    hidden_dims=config.intermediate_size,
                    activation=ACTIVATIONS[config.hidden_act],  # type: ignore[arg-type]
                ),
                norm=nn.LayerNorm,
                norm_eps=eps,
                norm_order="post",
            )
            for mixer in mixers
        ]
        embed = nn.Embedding(config.vocab_size, dims)
        super().__init__(embed, blocks, nn.Identity(), None, config)
        self.front = front
        self.head_proj = nn.Linear(dims, dims)
        self.head_norm = nn.LayerNorm(dims, eps=eps)
        self.logits_bias = mx.zeros((config.vocab_size,))
        draw_weights(self, config.initializer_range)

    @property
    def head_modules(self) -> list[nn.Module]:
        # its bias belongs to the model itself
        return [self]

    def hidden(self, tokens: mx.array, valid: mx.array | None = None) -> mx.array:
        context = Context(valid)
        return self.transform(self.front(known_rows(self.embed, tokens), context), context)

    def logits(self, hidden: mx.array) -> mx.array:
        act = FUNCTIONS[ACTIVATIONS[self.config.hidden_act]]
        x = self.head_norm(act(self.head_proj(hidden)))
        return apply_head(self.embed, x) + self.logits_bias


def weight_names(prefix: str, layer: Mapping[str, str]) -> dict[str, str | None]:
    """Hub names to ours.

    Args:
        prefix: What the encoder is called.
        layer: Names of the token mixer and its norm within a layer.
    """
    names: dict[str, str | None] = {
        f"{prefix}.embeddings.word_embeddings": "embed",
        f"{prefix}.embeddings.position_embeddings": "front.positions.rows",
        f"{prefix}.embeddings.token_type_embeddings": "front.segments",
        f"{prefix}.embeddings.LayerNorm": "front.norm",
        f"{prefix}.embeddings.position_ids": None,
        f"{prefix}.pooler": None,
    }
    parts = {
        "intermediate.dense": "channel_mixer.up_proj",
        "output.dense": "channel_mixer.down_proj",
        "output.LayerNorm": "channel_norm",
    }
    for theirs, ours in {**layer, **parts}.items():
        names[f"{prefix}.encoder.layer.{{}}.{theirs}"] = f"blocks.{{}}.{ours}"
    return names


HEAD_NAMES: Mapping[str, str | None] = {
    "cls.predictions.transform.dense": "head_proj",
    "cls.predictions.transform.LayerNorm": "head_norm",
    "cls.predictions.bias": "logits_bias",
    "cls.predictions.decoder": Copy("embed"),
    "cls.predictions.decoder.bias": Copy("logits_bias"),
    "cls.seq_relationship": None,
}
"""Names of the head of BERT and most of its successors."""

ATTENTION_NAMES: Mapping[str, str] = {
    "attention.self.query": "token_mixer.query_proj",
    "attention.self.key": "token_mixer.key_proj",
    "attention.self.value": "token_mixer.value_proj",
    "attention.output.dense": "token_mixer.output_proj",
    "attention.output.LayerNorm": "token_norm",
}
"""Names of attention and its norm within a layer."""


def heads_of(config: Mapping[str, Any], dims: int) -> int:
    """The number of heads of a configuration.

    Raises:
        CheckpointError: It does not divide the dims.
    """
    heads = integer(config, "num_attention_heads")
    if dims % heads:
        raise CheckpointError(
            f"[config.json] 'num_attention_heads' must divide 'hidden_size', {dims}, but got {heads}."
        )
    return heads

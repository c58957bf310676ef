"""Encoders in the format of BERT (Devlin et al., arXiv 1810.04805), whatever their token mixer is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ...channel_mixers import FeedForward
from ...channel_mixers.feed_forward import FUNCTIONS
from ...errors import CheckpointError
from ...layers import apply_head
from ...layers.attention.positions import LearnedPositions
from ...layers.context import Context, count_on
from ...layers.dense import Linear
from ...layers.embedding import known_rows
from ...layers.mixer import TokenMixer
from .architecture import Copy, draw_weights
from .block import Block
from .encoders import MaskedLM
from .fields import ACTIVATIONS, HubConfig, activation, integer, key, number, weight_std

TINY: Mapping[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class BertConfig(HubConfig):
    """The description of one encoder.

    What transformers takes for absent keys are the defaults.
    """

    fixed: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True, "is_decoder": False}

    vocab_size: int = key("Number of tokens V.", integer, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 768, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 12, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, 3072)
    hidden_act: str = key(
        "Its activation, and the head's.", activation, "gelu_new", supported=FUNCTIONS
    )
    max_position_embeddings: int = key("Rows of the table of positions.", integer, 512, high=2**20)
    type_vocab_size: int = key(
        "Rows of the table of segments, of which the first is used.", integer, 2, high=2**10
    )
    layer_norm_eps: float = key("Epsilon of the norms.", number, 1e-12, low=1e-15, high=1.0)
    initializer_range: float = weight_std()

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "tie_word_embeddings": True}


@dataclass(frozen=True)
class AttentionConfig(BertConfig):
    """The description of an encoder with attention."""

    num_attention_heads: int = key("Heads.", integer, 12)

    def __post_init__(self) -> None:
        dims, heads = self.hidden_size, self.num_attention_heads
        if dims % heads:
            raise CheckpointError(
                f"[config.json] 'num_attention_heads' must divide 'hidden_size', {dims}, but got "
                f"{heads}."
            )


class Front(nn.Module):
    """The layers before the first block: positions and the first segment are added, then normed.

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
            self.projection = Linear(dims, dims)

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        positions, _ = count_on(mx.zeros((x.shape[0],), mx.int32), x.shape[1], context)
        x = self.norm(x * self._scale + self.positions(positions) + self.segments.weight[0])
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
        self.head_proj = Linear(dims, dims)
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

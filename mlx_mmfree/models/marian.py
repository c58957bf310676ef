"""Marian, the Transformer of Vaswani et al. (arXiv 1706.03762) as trained by Helsinki-NLP.

Norms follow the sums, positions are sines before cosines, and one table embeds both texts and
makes the logits, with a bias for each token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..errors import UnsupportedModelError
from ..layers.attention.positions import AddedPositions, SinusoidalPositions
from ..token_mixers import MultiHeadAttention
from .parts.architecture import Architecture, Copy, Published, draw_weights
from .parts.block import Block
from .parts.encoders import EncoderDecoder
from .parts.fields import (
    ACTIVATIONS,
    HubConfig,
    activation,
    boolean,
    integer,
    key,
    refuse_unless,
    token_id,
    weight_std,
)
from .parts.stack import Stack

_NORM_EPS = 1e-5
_TOKENS = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
_WRITTEN = {
    "static_position_embeddings": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}
_SECOND_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
"""Keys that in transformers win over those that mean the same."""

_LINEARS = {
    "self_attn.q_proj": "token_mixer.query_proj",
    "self_attn.k_proj": "token_mixer.key_proj",
    "self_attn.v_proj": "token_mixer.value_proj",
    "self_attn.out_proj": "token_mixer.output_proj",
    "self_attn_layer_norm": "token_norm",
    "encoder_attn.q_proj": "memory_mixer.query_proj",
    "encoder_attn.k_proj": "memory_mixer.key_proj",
    "encoder_attn.v_proj": "memory_mixer.value_proj",
    "encoder_attn.out_proj": "memory_mixer.output_proj",
    "encoder_attn_layer_norm": "memory_norm",
    "fc1": "channel_mixer.up_proj",
    "fc2": "channel_mixer.down_proj",
    "final_layer_norm": "channel_norm",
}


@dataclass(frozen=True)
class Config(HubConfig):
    """The architecture of one Marian model.

    What transformers takes for absent keys are the defaults.
    """

    model_type: ClassVar[str] = "marian"
    hub_class: ClassVar[str] = "MarianMTModel"
    fixed: ClassVar[Mapping[str, Any]] = {
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        **_WRITTEN,
    }

    vocab_size: int = key("Number of tokens V of both languages.", integer, 58101, high=2**24)
    d_model: int = key("Model dims D.", integer, 1024, high=2**17)
    encoder_layers: int = key("Blocks that read the source.", integer, 12, high=1024)
    decoder_layers: int = key("Blocks that write the target.", integer, 12, high=1024)
    encoder_attention_heads: int = key("Heads of the former.", integer, 16)
    decoder_attention_heads: int = key("Heads of the latter.", integer, 16)
    encoder_ffn_dim: int = key("Width of the feed-forward of the former.", integer, 4096)
    decoder_ffn_dim: int = key("Width of the feed-forward of the latter.", integer, 4096)
    activation_function: str = key(
        "Activation of both.", activation, "gelu", supported=("silu", "relu", "gelu", "gelu_tanh")
    )
    scale_embedding: bool = key("Embedded tokens are multiplied by the root of D.", boolean, False)
    max_position_embeddings: int = key(
        "Positions of the longest text that it was made for.", integer, 1024, high=2**20
    )
    pad_token_id: int = key("The token of padding, which is never written.", token_id, 58100)
    eos_token_id: int = key("The token after the last.", token_id, 0)
    decoder_start_token_id: int = key("The token before the first of the target.", token_id, 58100)
    num_beams: int = key("Beams that its publishers search with.", integer, 1, high=1024)
    init_std: float = weight_std()

    def __post_init__(self) -> None:
        for name in ("encoder_attention_heads", "decoder_attention_heads"):
            heads = getattr(self, name)
            if self.d_model % heads:
                raise UnsupportedModelError(
                    f"[config.json] '{name}' must divide 'd_model', {self.d_model}, but got {heads}."
                )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        seconds = {key: config[name] for name, key in _SECOND_NAMES.items() if name in config}
        vocab_size = integer(config, "vocab_size", cls.vocab_size, high=2**24)
        for name in _TOKENS:
            # a token of the usual vocabulary stands for nothing in a smaller one
            if name not in config and getattr(cls, name) >= vocab_size:
                integer(config, name)
        refuse_unless(config, {"decoder_vocab_size": vocab_size})
        return super().from_hub({**config, **seconds})

    def to_hub(self) -> dict[str, Any]:
        sizes = {"is_encoder_decoder": True, "decoder_vocab_size": self.vocab_size}
        return {**super().to_hub(), **sizes, **_WRITTEN}


class Marian(EncoderDecoder):
    """An `EncoderDecoder` with a bias of the logits, `(1, V)`."""

    @property
    def start_token_id(self) -> int:
        return int(self.config.decoder_start_token_id)

    @property
    def unwritten_tokens(self) -> tuple[int, ...]:
        return (self.config.pad_token_id,)

    @property
    def head_modules(self) -> list[nn.Module]:
        # its bias belongs to the model itself
        return [self]

    def logits(self, hidden: mx.array) -> mx.array:
        return super().logits(hidden) + self.logits_bias


def build(config: Config) -> Marian:
    """A model with fresh weights."""
    dims = config.d_model
    encoder = Stack(
        [_block(config, "encoder") for _ in range(config.encoder_layers)],
        nn.Identity(),
        _positions(config),
    )
    blocks = [_block(config, "decoder") for _ in range(config.decoder_layers)]
    embed = nn.Embedding(config.vocab_size, dims)
    model = Marian(embed, encoder, blocks, nn.Identity(), None, config, _positions(config))
    model.logits_bias = mx.zeros((1, config.vocab_size))
    return draw_weights(model, config.init_std)


def _positions(config: Config) -> AddedPositions:
    dims = config.d_model
    scale = dims**0.5 if config.scale_embedding else 1.0
    return AddedPositions(dims, SinusoidalPositions(dims, layout="concatenated"), scale=scale)


def _block(config: Config, side: str) -> Block:
    dims, heads = config.d_model, getattr(config, f"{side}_attention_heads")
    is_decoder = side == "decoder"
    memory_mixer = None
    if is_decoder:
        memory_mixer = MultiHeadAttention(dims, num_heads=heads, bias=True, is_causal=False)
    return Block(
        dims,
        MultiHeadAttention(dims, num_heads=heads, bias=True, is_causal=is_decoder),
        FeedForward(
            dims,
            hidden_dims=getattr(config, f"{side}_ffn_dim"),
            activation=ACTIVATIONS[config.activation_function],  # type: ignore[arg-type]
        ),
        memory_mixer=memory_mixer,
        norm=nn.LayerNorm,
        norm_eps=_NORM_EPS,
        norm_order="post",
    )


def _weight_names() -> dict[str, str | None]:
    names: dict[str, str | None] = {
        "model.shared": "embed",
        "final_logits_bias": "logits_bias",
        "lm_head": Copy("embed"),
    }
    for side, stack in (("encoder", "encoder.blocks"), ("decoder", "blocks")):
        names[f"model.{side}.embed_tokens"] = Copy("embed")
        names[f"model.{side}.embed_positions"] = None
        for theirs, ours in _LINEARS.items():
            if side == "decoder" or "encoder_attn" not in theirs:
                names[f"model.{side}.layers.{{}}.{theirs}"] = f"{stack}.{{}}.{ours}"
    return names


ARCHITECTURE = Architecture(
    name="marian",
    config=Config,
    build=build,
    weight_names=_weight_names(),
    does=lambda config: "translation",
    tiny={
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "pad_token_id": 59,
        "decoder_start_token_id": 59,
    },
    published={"Helsinki-NLP/opus-mt-*": Published("floats", "transformers")},
)

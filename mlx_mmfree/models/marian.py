"""Marian, the Transformer of Vaswani et al. (arXiv 1706.03762) as trained by Helsinki-NLP.

Norms stand behind the sums, positions are sines before cosines, and one table embeds both texts and
makes the logits, with a bias for each token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..errors import UnsupportedModelError
from ..layers.attention.positions import AddedPositions, SinusoidalPositions
from ..token_mixers import MultiHeadAttention
from .parts.architecture import Architecture, Copy
from .parts.block import Block
from .parts.encoder_decoder import EncoderDecoder
from .parts.fields import ACTIVATIONS, activation, boolean, integer, number, refuse_unless
from .parts.initialization import draw_weights
from .parts.stack import Stack

_SUPPORTED = ("silu", "relu", "gelu", "gelu_tanh")
_NORM_EPS = 1e-5
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 58101,
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "scale_embedding": False,
    "max_position_embeddings": 1024,
    "pad_token_id": 58100,
    "eos_token_id": 0,
    "decoder_start_token_id": 58100,
    "num_beams": 1,
    "init_std": 0.02,
}
"""What transformers takes for keys that a `config.json` leaves out."""
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
class Config:
    """The architecture of one Marian model.

    Attributes:
        vocab_size: Number of tokens V of both languages.
        d_model: Model dims D.
        encoder_layers: Blocks that read the source.
        decoder_layers: Blocks that write the target.
        encoder_attention_heads: Heads of the former.
        decoder_attention_heads: Heads of the latter.
        encoder_ffn_dim: Width of the feed-forward of the former.
        decoder_ffn_dim: Width of the feed-forward of the latter.
        activation_function: Activation of both.
        scale_embedding: Embedded tokens are multiplied by the root of D.
        max_position_embeddings: Positions of the longest text that it was made for.
        pad_token_id: The token of padding, which is never written.
        eos_token_id: The token after the last.
        decoder_start_token_id: The token before the first of the target.
        num_beams: Beams that its publishers search with.
        init_std: Standard deviation of freshly made weights.
    """

    vocab_size: int
    d_model: int
    encoder_layers: int
    decoder_layers: int
    encoder_attention_heads: int
    decoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_ffn_dim: int
    activation_function: str = "swish"
    scale_embedding: bool = True
    max_position_embeddings: int = 512
    pad_token_id: int = 0
    eos_token_id: int = 0
    decoder_start_token_id: int = 0
    num_beams: int = 1
    init_std: float = 0.02

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        refuse_unless(
            config,
            {
                "normalize_before": False,
                "normalize_embedding": False,
                "add_final_layer_norm": False,
                "static_position_embeddings": True,
                "share_encoder_decoder_embeddings": True,
                "tie_word_embeddings": True,
            },
        )
        seconds = {key: config[name] for name, key in _SECOND_NAMES.items() if name in config}
        vocab_size = integer(config, "vocab_size", _DEFAULTS["vocab_size"], high=2**24)
        # a token of the usual vocabulary stands for nothing in a smaller one
        usual = {
            key: value
            for key, value in _DEFAULTS.items()
            if not key.endswith("token_id") or value < vocab_size
        }
        config = {**usual, **config, **seconds}
        dims = integer(config, "d_model", high=2**17)
        refuse_unless(config, {"decoder_vocab_size": vocab_size})
        token = {"low": 0, "high": vocab_size - 1}
        return cls(
            vocab_size=vocab_size,
            d_model=dims,
            encoder_layers=integer(config, "encoder_layers", high=1024),
            decoder_layers=integer(config, "decoder_layers", high=1024),
            encoder_attention_heads=_heads(config, "encoder_attention_heads", dims),
            decoder_attention_heads=_heads(config, "decoder_attention_heads", dims),
            encoder_ffn_dim=integer(config, "encoder_ffn_dim"),
            decoder_ffn_dim=integer(config, "decoder_ffn_dim"),
            activation_function=activation(config, "activation_function", _SUPPORTED, "gelu"),
            scale_embedding=boolean(config, "scale_embedding"),
            max_position_embeddings=integer(config, "max_position_embeddings", high=2**20),
            pad_token_id=integer(config, "pad_token_id", **token),
            eos_token_id=integer(config, "eos_token_id", **token),
            decoder_start_token_id=integer(config, "decoder_start_token_id", **token),
            num_beams=integer(config, "num_beams", high=1024),
            init_std=number(config, "init_std", low=0.0, high=10.0),
        )

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this architecture, read back by `from_hub`."""
        return {
            "model_type": "marian",
            "architectures": ["MarianMTModel"],
            "is_encoder_decoder": True,
            **asdict(self),
            "decoder_vocab_size": self.vocab_size,
            "static_position_embeddings": True,
            "share_encoder_decoder_embeddings": True,
            "tie_word_embeddings": True,
        }


def _heads(config: Mapping[str, Any], key: str, dims: int) -> int:
    heads = integer(config, key)
    if dims % heads:
        raise UnsupportedModelError(
            f"[config.json] '{key}' must divide 'd_model', {dims}, but got {heads}."
        )
    return heads


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
)

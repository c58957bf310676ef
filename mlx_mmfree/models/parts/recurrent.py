"""Models of flash-linear-attention: blocks of a recurrent mixer and SwiGLU, with norms before both."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import mlx.nn as nn

from ...channel_mixers import SwiGLU
from ...layers import RoPE
from ...layers.attention.options import KeyValueCache
from ...layers.mixer import TokenMixer
from ...token_mixers import GQA
from .block import Block
from .decoder import Decoder
from .initialization import draw_weights
from .recurrent_config import AttentionBlocks, RecurrentConfig

Model = TypeVar("Model", bound=Decoder)

_ATTENTION = {
    "q_proj": "query_proj",
    "k_proj": "key_proj",
    "v_proj": "value_proj",
    "o_proj": "output_proj",
}


def weight_names(mixer: Mapping[str, str]) -> dict[str, str | None]:
    """Hub names to ours, whatever the blocks with attention are.

    Args:
        mixer: Names within the mixer, without those of the four projections of attention.
    """
    names: dict[str, str | None] = {
        "model.embeddings": "embed",
        "model.layers.{}.attn_norm": "blocks.{}.token_norm",
        "model.layers.{}.mlp_norm": "blocks.{}.channel_norm",
        "model.layers.{}.mlp": "blocks.{}.channel_mixer",
        "model.norm": "norm",
        "lm_head": "head",
    }
    for theirs, ours in {**mixer, **_ATTENTION}.items():
        names[f"model.layers.{{}}.attn.{theirs}"] = f"blocks.{{}}.token_mixer.{ours}"
    return names


def build_recurrent(
    config: RecurrentConfig,
    mixer: Callable[[], TokenMixer],
    kind: Callable[..., Model],
) -> Model:
    """A model with fresh weights.

    Args:
        config: Its description.
        mixer: Makes the mixer of a block.
        kind: Makes the model, as `Decoder` does.
    """
    dims, eps = config.hidden_size, config.norm_eps
    embed = nn.Embedding(config.vocab_size, dims)
    blocks = []
    for number in range(config.num_hidden_layers):
        attention = config.attention_of(number)
        token_mixer = mixer() if attention is None else _attention(dims, attention)
        channel_mixer = SwiGLU(dims, hidden_dims=config.intermediate_size)
        blocks.append(Block(dims, token_mixer, channel_mixer, norm_eps=eps))
    head = None if config.tie_word_embeddings else nn.Linear(dims, config.vocab_size, bias=False)
    model = kind(embed, blocks, nn.RMSNorm(dims, eps=eps), head, config)
    return draw_weights(model, config.initializer_range)


def _attention(dims: int, attention: AttentionBlocks) -> GQA:
    return GQA(
        dims,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        linear={**dict.fromkeys(_ATTENTION.values(), nn.Linear), "output_proj": _without_bias},
        bias=attention.qkv_bias,
        rope=RoPE(dims // attention.num_heads, base=attention.rope_theta),
        cache=KeyValueCache(attention.window_size),
    )


def _without_bias(input_dims: int, output_dims: int, **_: Any) -> nn.Module:
    return nn.Linear(input_dims, output_dims, bias=False)

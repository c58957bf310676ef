"""Reformer (Kitaev et al., arXiv 2001.04451) as Transformers has it: a decoder of reversible blocks.

Directions of the hash are drawn anew in each call there, and here once from a seed, so that tokens that
are read one by one fall into the buckets of those before. Beyond a chunk, a token sees others when it is
read with a prompt than when it is read alone, by nature and as there; here a prompt is read without its
last token. The bias of the head is `lm_head.decoder.bias`, or where a checkpoint of Transformers before
version 5 has none, `lm_head.bias`, which is the same there.
"""

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..layers.attention.positions import AddedPositions, AxialPositions, LearnedPositions
from ..layers.mixer import TokenMixer
from ..token_mixers import LocalAttention
from ..token_mixers import Reformer as HashedAttention
from .parts.architecture import Architecture, OlderName
from .parts.decoder import Decoder
from .parts.fields import ACTIVATIONS
from .parts.initialization import draw_weights
from .parts.reformer_config import ReformerConfig
from .parts.reversible import ReversibleBlock

_LAYER: dict[str, str | None] = {
    "attention.layer_norm": "token_norm",
    "attention.self_attention.query_key": "token_mixer.query_key_proj",
    "attention.self_attention.query": "token_mixer.query_proj",
    "attention.self_attention.key": "token_mixer.key_proj",
    "attention.self_attention.value": "token_mixer.value_proj",
    "attention.output.dense": "token_mixer.output_proj",
    "feed_forward.layer_norm": "channel_norm",
    "feed_forward.dense.dense": "channel_mixer.up_proj",
    "feed_forward.output.dense": "channel_mixer.down_proj",
    # constants that older versions stored
    "attention.self_attention.self_mask_value_float16": None,
    "attention.self_attention.self_mask_value_float32": None,
    "attention.self_attention.mask_value_float16": None,
    "attention.self_attention.mask_value_float32": None,
}

WEIGHT_NAMES: dict[str, str | None] = {
    **{
        f"reformer.encoder.layers.{{}}.{theirs}": None if ours is None else f"blocks.{{}}.{ours}"
        for theirs, ours in _LAYER.items()
    },
    "reformer.embeddings.word_embeddings": "embed",
    "reformer.embeddings.position_embeddings.weights.0": "positions.code.lines",
    "reformer.embeddings.position_embeddings.weights.1": "positions.code.columns",
    "reformer.embeddings.position_embeddings.embedding": "positions.code.rows",
    "reformer.encoder.layer_norm": "norm",
    "lm_head.decoder": "head",
    "lm_head.bias": OlderName("head.bias"),
}


class Reformer(Decoder):
    """A `Decoder` of reversible blocks, whose two streams begin alike and are normed side by side."""

    def joined(self, x: mx.array) -> mx.array:
        return x


def build(config: ReformerConfig) -> Reformer:
    """A model with fresh weights."""
    dims, eps = config.hidden_size, config.layer_norm_eps
    blocks = [
        ReversibleBlock(
            dims,
            _mixer(config, number),
            FeedForward(
                dims,
                hidden_dims=config.feed_forward_size,
                activation=ACTIVATIONS[config.hidden_act],  # type: ignore[arg-type]
            ),
            norm_eps=eps,
        )
        for number in range(len(config.attn_layers))
    ]
    code: nn.Module
    if config.axial_pos_shape is not None and config.axial_pos_embds_dim is not None:
        code = AxialPositions(config.axial_pos_shape, config.axial_pos_embds_dim)
    else:
        code = LearnedPositions(dims, max_length=config.max_position_embeddings)
    model = Reformer(
        nn.Embedding(config.vocab_size, dims),
        blocks,
        nn.LayerNorm(2 * dims, eps=eps),
        nn.Linear(2 * dims, config.vocab_size),
        config,
        AddedPositions(dims, code),
    )
    return draw_weights(model, config.initializer_range)


def _mixer(config: ReformerConfig, number: int) -> TokenMixer:
    heads, head_dim = config.num_attention_heads, config.attention_head_size
    if config.attn_layers[number] == "local":
        return LocalAttention(
            config.hidden_size,
            block_size=config.local_attn_chunk_length,
            num_heads=heads,
            head_dim=head_dim,
        )
    return HashedAttention(
        config.hidden_size,
        chunk_size=config.lsh_attn_chunk_length,
        num_rounds=config.num_hashes,
        num_buckets=config.num_buckets,
        convention="transformers",
        seed=number if config.hash_seed is None else config.hash_seed,
        num_heads=heads,
        head_dim=head_dim,
    )


ARCHITECTURE = Architecture(
    name="reformer",
    config=ReformerConfig,
    build=build,
    weight_names=WEIGHT_NAMES,
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "attn_layers": ["local", "lsh"],
        "num_attention_heads": 2,
        "attention_head_size": 16,
        "feed_forward_size": 48,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [8, 24],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 4,
        "num_buckets": [2, 4],
        "is_decoder": True,
    },
)

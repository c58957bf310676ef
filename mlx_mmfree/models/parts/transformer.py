"""The family of transformers around Llama: their names on the Hub, and their blocks.

A file of `models` says what sets one architecture of the family apart.
"""

from collections.abc import Sequence

import mlx.nn as nn

from ...channel_mixers import SwiGLU
from ...channel_mixers.gated_linear_unit import GatedLinearUnit
from ...layers import RoPE
from ...token_mixers import GQA, AttentionNorms
from .block import Block
from .decoder import Decoder
from .initialization import draw_weights
from .ternary_linears import linear_of
from .transformer_config import TransformerConfig

LINEARS = {
    "self_attn.q_proj": "token_mixer.query_proj",
    "self_attn.k_proj": "token_mixer.key_proj",
    "self_attn.v_proj": "token_mixer.value_proj",
    "self_attn.o_proj": "token_mixer.output_proj",
    "mlp.gate_proj": "channel_mixer.gate_proj",
    "mlp.up_proj": "channel_mixer.up_proj",
    "mlp.down_proj": "channel_mixer.down_proj",
}
"""Linears of a block, Hub name to ours."""


def weight_names(sub_norms: tuple[str, str] | None = None) -> dict[str, str | None]:
    """Hub names to ours.

    Args:
        sub_norms: What the Hub calls the norms before the last projection of attention and of the
            feed-forward, where there are some.
    """
    names: dict[str, str | None] = {
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm.weight": "blocks.{}.token_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.channel_norm.weight",
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
        "model.norm.weight": "norm.weight",
        "lm_head": "head",
        "lm_head.rms_norm": "head.norm",
    }
    if sub_norms is not None:
        attention, feed_forward = sub_norms
        names |= {
            f"model.layers.{{}}.{attention}.weight": "blocks.{}.token_mixer.output_norm.weight",
            f"model.layers.{{}}.{feed_forward}.weight": "blocks.{}.channel_mixer.hidden_norm.weight",
        }
    for hub, ours in LINEARS.items():
        names[f"model.layers.{{}}.{hub}"] = f"blocks.{{}}.{ours}"
        names[f"model.layers.{{}}.{hub}.rms_norm"] = f"blocks.{{}}.{ours}.norm"
    return names


def build_transformer(
    config: TransformerConfig,
    *,
    gated: type[GatedLinearUnit] = SwiGLU,
    qk_norm_eps: float | None = None,
) -> Decoder:
    """A model of this family with fresh weights, in its training form.

    Args:
        config: Its architecture.
        gated: The feed-forward.
        qk_norm_eps: As `AttentionNorms.qk_eps`.
    """
    dims = config.hidden_size
    embed = nn.Embedding(config.vocab_size, dims)
    rope = config.rotation.build(config.head_dim)
    blocks = [_block(config, n, rope, gated, qk_norm_eps) for n in range(config.num_hidden_layers)]
    head = None
    if not config.tie_word_embeddings:
        head = linear_of(config.linears, "lm_head")(dims, config.vocab_size, bias=False)
    norm = nn.RMSNorm(dims, eps=config.rms_norm_eps)
    return draw_weights(Decoder(embed, blocks, norm, head, config), config.initializer_range)


def _block(
    config: TransformerConfig,
    number: int,
    rope: RoPE,
    gated: type[GatedLinearUnit],
    qk_norm_eps: float | None,
) -> Block:
    dims, eps = config.hidden_size, config.rms_norm_eps
    sub_norm_eps = eps if config.has_sub_norms else None
    linears = {
        ours.split(".")[1]: linear_of(config.linears, f"model.layers.{number}.{hub}")
        for hub, ours in LINEARS.items()
    }
    return Block(
        dims,
        GQA(
            dims,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            linear=linears,
            bias=config.attention_bias,
            rope=rope,
            norms=AttentionNorms(qk_norm_eps, sub_norm_eps),
        ),
        gated(
            dims,
            hidden_dims=config.intermediate_size,
            linear=linears,
            bias=config.mlp_bias,
            norm_eps=sub_norm_eps,
        ),
        norm_eps=eps,
    )


def mlx_lm_file(config: TransformerConfig, ternary_dims: Sequence[int]) -> str | None:
    """As `Architecture.mlx_lm`, where mlx-lm has an architecture of the same name.

    It knows ternary linears in sizes of whole groups.
    """
    is_known = True
    if ternary_dims:
        is_plain = config.linears is not None and config.linears.norm_eps is None
        has_groups = all(dims % 32 == 0 for dims in ternary_dims)
        is_known = is_plain and has_groups
    return "" if is_known else "ternary_transformer.py"


TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

"""Llama (Touvron et al., arXiv 2302.13971), dense or with the ternary linears of BitNet b1.58.

Ternary checkpoints of this type are HF1BitLLM's Llama3, Falcon3 and Falcon-E, and 1bitLLM's
`BitnetForCausalLM`, which has norms before the last projection of attention and feed-forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from .parts import transformer
from .parts.architecture import Architecture, GGUFFormat, Published, find
from .parts.ternary_linears import PACKED_FORMATS

SUB_NORMS = ("self_attn.inner_attn_ln", "mlp.ffn_layernorm")
WEIGHT_NAMES = transformer.weight_names(SUB_NORMS)


@dataclass(frozen=True)
class Config(transformer.TransformerConfig):
    """The description of one Llama."""

    model_type: ClassVar[str] = "llama"
    hub_class: ClassVar[str] = "LlamaForCausalLM"
    sub_norm_class: ClassVar[str | None] = "BitnetForCausalLM"


build = transformer.build_transformer


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool:
    """Like `Architecture.mlx_lm`: mlx-lm knows Llama in sizes of whole groups."""
    if config.has_sub_norms:
        return bool(ternary_dims)
    return transformer.needs_mlx_lm_file(config, ternary_dims)


def _why_not_in_transformers(config: Config) -> str | None:
    """Like `Architecture.transformers`."""
    if config.has_sub_norms:
        return "its Llama would leave out the norms before the last projections"
    return None


def _as_in_transformers(config: Config) -> Any:
    """Its BitNet has the norms before the last projections that its Llama has not."""
    heads_dims = config.num_attention_heads * config.head_dim
    if not config.has_sub_norms or heads_dims != config.hidden_size or config.mlp_bias:
        return config
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    return find("bitnet").config(**given)


def _shape(
    dims: int, hidden_dims: int, layers: int, heads: tuple[int, int, int], vocab_size: int
) -> dict[str, Any]:
    """A published shape; `heads` counts queries, keys and values, and gives their dims."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": dims,
        "num_hidden_layers": layers,
        "intermediate_size": hidden_dims,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000042.0,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "bitnet"},
        "torch_dtype": "bfloat16",
    }


ARCHITECTURE = Architecture(
    name="llama",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    packed_formats=(*PACKED_FORMATS, "hadamard"),
    may_hold_masters=True,
    is_ternarizable=True,
    why_no_base=None,
    mlx_lm=_needs_mlx_lm_file,
    transformers=_why_not_in_transformers,
    as_in_transformers=_as_in_transformers,
    gguf={
        "llama": GGUFFormat({"model_type": "llama"}, rotates_pairs=True, may_be_rotated=True),
        "bitnet": GGUFFormat(
            {"model_type": "llama", "architectures": ["BitnetForCausalLM"]},
            SUB_NORMS,
            is_ternary=True,
        ),
    },
    gguf_name=lambda config: "bitnet" if config.has_sub_norms else "llama",
    tiny=transformer.TINY,
    presets={
        "falcon3-1b": _shape(2048, 8192, 18, (8, 4, 256), 131072),
        "falcon3-3b": _shape(3072, 9216, 22, (12, 4, 256), 131072),
        "falcon3-7b": _shape(3072, 23040, 28, (12, 4, 256), 131072),
        "falcon3-10b": _shape(3072, 23040, 40, (12, 4, 256), 131072),
        "falcon-e-1b": _shape(2048, 9216, 24, (16, 2, 128), 32768),
        "falcon-e-3b": _shape(2048, 13312, 32, (16, 2, 128), 32768),
        "llama3-8b-1.58": _shape(4096, 14336, 32, (32, 8, 128), 128256),
    },
    published={
        "openbmb/BitCPM-CANN-1B": Published("16-bit, ternary by group", "reference, definition"),
        "1bitLLM/bitnet_b1_58-{large,xl,3B}": Published("float masters", "reference, definition"),
        "HF1BitLLM/Llama3-8B-1.58-{100B,Linear-10B,Sigmoid-k100-10B}-tokens": Published(
            "packed ternary", "reference, transformers, definition"
        ),
        "SpectraSuite/TriLM_{99M,190M,390M,560M,830M,1.1B,1.5B,2.4B,3.9B}_Unpacked": Published(
            "fp16, ternary", "transformers, definition"
        ),
        "mlx-community/Falcon-E-3B-Instruct-1.58bit": Published(
            "packed ternary", "reference, transformers, definition"
        ),
        "tiiuae/Falcon-E-{1B,3B}-{Base,Instruct}": Published(
            "packed ternary; bf16 masters at `prequantized`", "reference, transformers, definition"
        ),
        "tiiuae/Falcon-E-{1B,3B}-{Base,Instruct}-GGUF": Published("GGUF I2_S", "definition"),
        "tiiuae/Falcon3-{1B,3B,7B,10B}-Instruct-1.58bit": Published(
            "packed ternary", "reference, transformers, definition"
        ),
        "tiiuae/Falcon3-{3B,7B,10B}-Base-1.58bit": Published(
            "packed ternary", "reference, transformers, definition"
        ),
        "tiiuae/Falcon3-{1B,3B,7B,10B}-Instruct-1.58bit-GGUF": Published("GGUF I2_S", "definition"),
        "tiiuae/Falcon3-{3B,7B,10B}-Base-1.58bit-GGUF": Published("GGUF I2_S", "definition"),
    },
)

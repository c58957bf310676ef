"""Qwen3 (Yang et al., arXiv 2505.09388): Llama with norms of each head's queries and keys.

Bonsai of the first generation is of this type, with weights in MLX's affine format of 1 or 2 bits. So is
the larger of BitNet's models that embed texts, with a norm in each of its ternary linears.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .parts import transformer
from .parts.architecture import Architecture, GGUFFormat, Published
from .parts.embedder import embedder_names
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS

WEIGHT_NAMES = transformer.weight_names() | {
    "model.layers.{}.self_attn.q_norm.weight": "blocks.{}.token_mixer.query_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blocks.{}.token_mixer.key_norm.weight",
}


@dataclass(frozen=True)
class Config(transformer.TransformerConfig):
    """The architecture of one Qwen3 model."""

    model_type: ClassVar[str] = "qwen3"
    hub_class: ClassVar[str] = "Qwen3ForCausalLM"
    embedder_class: ClassVar[str | None] = "Qwen3Model"
    fixed: ClassVar[Mapping[str, Any]] = {
        **transformer.TransformerConfig.fixed,
        "use_sliding_window": False,
    }

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32768


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    return transformer.build_transformer(config, qk_norm_eps=config.rms_norm_eps)


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """Like `Architecture.mlx_lm`: mlx-lm knows Qwen3 without biases, and embeds nothing."""
    if config.is_embedder:
        return None
    has_biases = config.attention_bias or config.mlp_bias
    return has_biases or transformer.needs_mlx_lm_file(config, ternary_dims)


def _why_not_in_transformers(config: Config) -> str | None:
    return "its feed-forward has no bias in this architecture" if config.mlp_bias else None


def _bonsai(
    dims: int, layers: int, hidden_dims: int, *, heads: int, is_tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": dims,
        "num_hidden_layers": layers,
        "intermediate_size": hidden_dims,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "float16",
        "quantization": {"group_size": 128, "bits": 2},
    }


def _few_bit_sampling(is_rotated: bool, thinks: bool) -> Mapping[str, float]:
    """Like `Architecture.few_bit_sampling`: the settings of Bonsai's demonstration."""
    return {"temp": 0.5, "top_p": 0.85, "top_k": 20}


ARCHITECTURE = Architecture(
    name="qwen3",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    newer_name=embedder_names,
    packed_formats=(*PACKED_FORMATS, "hadamard"),
    is_ternarizable=True,
    why_no_base=None,
    mlx_lm=_needs_mlx_lm_file,
    transformers=_why_not_in_transformers,
    gguf={"qwen3": GGUFFormat({"model_type": "qwen3"}, may_be_rotated=True)},
    gguf_name=lambda config: "qwen3",
    tiny={**transformer.TINY, "head_dim": 8},
    presets={
        "ternary-bonsai-1.7b": _bonsai(2048, 28, 6144, heads=16, is_tied=True),
        "ternary-bonsai-4b": _bonsai(2560, 36, 9728, heads=32, is_tied=True),
        "ternary-bonsai-8b": _bonsai(4096, 36, 12288, heads=32, is_tied=False),
    },
    few_bit_sampling=_few_bit_sampling,
    published={
        "IntelLabsChina/CAT-Q": Published("GGUF Q2_0, a folder for each model", "definition"),
        "microsoft/bitnet-embedding-0.6b": Published("16-bit masters", "reference"),
        "prism-ml/Bonsai-{1.7B,4B,8B}-mlx-1bit": Published(
            "MLX affine, 1 bit", "reference, mlx-lm"
        ),
        "prism-ml/Bonsai-{1.7B,4B,8B}-gguf": Published("GGUF Q1_0", "reference, definition"),
        "prism-ml/Ternary-Bonsai-{1.7B,4B,8B}-mlx-2bit": Published(
            "MLX affine, 2 bits", "mlx-lm, definition"
        ),
        "prism-ml/Ternary-Bonsai-{1.7B,4B,8B}-unpacked": Published(
            "16-bit, ternary by group", "definition"
        ),
        "prism-ml/Ternary-Bonsai-{1.7B,4B,8B}-gguf": Published("GGUF Q2_0", "definition"),
    },
)

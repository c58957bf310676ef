"""BitNet b1.58 2B4T (Ma et al., arXiv 2504.12285): Llama with squared ReLU and further norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..channel_mixers import SquaredReLUGLU, SwiGLU
from ..channel_mixers.gated_linear_unit import GatedLinearUnit
from .parts.architecture import Architecture, GGUFFormat, Published
from .parts.fields import activation, key
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS, TernaryLinears
from .parts.transformer import TINY, TransformerConfig, build_transformer, weight_names

SUB_NORMS = ("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")
WEIGHT_NAMES = weight_names(SUB_NORMS)

# silu: models of 1bitLLM in the names of transformers' BitNet
_FEED_FORWARDS: dict[str, type[GatedLinearUnit]] = {"relu2": SquaredReLUGLU, "silu": SwiGLU}


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The architecture of one BitNet model; its linears but the head are ternary in any case."""

    model_type: ClassVar[str] = "bitnet"
    hub_class: ClassVar[str] = "BitNetForCausalLM"
    # transformers takes 500,000 where it is missing, mlx-lm 10,000
    default_theta: ClassVar[float | None] = None

    vocab_size: int = 128256
    hidden_size: int = 2560
    num_hidden_layers: int = 30
    intermediate_size: int = 6912
    num_attention_heads: int = 20
    num_key_value_heads: int = 5
    rms_norm_eps: float = 1e-5
    linears: TernaryLinears | None = TernaryLinears()  # noqa: RUF009
    has_sub_norms: bool = True
    hidden_act: str = key(
        "Activation of the feed-forward's gate.",
        activation,
        "relu2",
        supported=_FEED_FORWARDS,
        as_meant=True,
    )


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    return build_transformer(config, gated=_FEED_FORWARDS[config.hidden_act])


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool:
    return bool(ternary_dims)


def _why_not_in_transformers(config: Config) -> str | None:
    if config.num_attention_heads * config.head_dim != config.hidden_size:
        return "its BitNet takes heads of hidden_size dims together only"
    return "its feed-forward has no bias in this architecture" if config.mlp_bias else None


def _shape(
    dims: int, hidden_dims: int, layers: int, heads: tuple[int, int], vocab_size: int
) -> dict[str, Any]:
    """A published shape; `heads` counts queries, and keys and values."""
    return {
        "model_type": "bitnet",
        "vocab_size": vocab_size,
        "hidden_size": dims,
        "num_hidden_layers": layers,
        "intermediate_size": hidden_dims,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


_IN_GGUF = GGUFFormat(
    {"model_type": "bitnet", "architectures": ["BitNetForCausalLM"], "hidden_act": "relu2"},
    SUB_NORMS,
    is_ternary=True,
)

ARCHITECTURE = Architecture(
    name="bitnet",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    packed_formats=PACKED_FORMATS,
    needs_range=True,
    why_no_base=None,
    mlx_lm=_needs_mlx_lm_file,
    transformers=_why_not_in_transformers,
    gguf={"bitnet-25": _IN_GGUF, "bitnet-b1.58": _IN_GGUF},
    gguf_name=lambda config: "bitnet" if config.hidden_act == "silu" else "bitnet-b1.58",
    tiny=TINY | {"rope_theta": 500000.0},
    presets={
        "bitnet-2b-4t": _shape(2560, 6912, 30, (20, 5), 128256),
        "bitnet-b1.58-large": _shape(1536, 4096, 24, (16, 16), 32002),
        "bitnet-b1.58-3b": _shape(3200, 8640, 26, (32, 32), 32002),
    },
    published={
        "microsoft/bitnet-b1.58-2B-4T": Published(
            "packed ternary", "reference, transformers, definition"
        ),
        "microsoft/bitnet-b1.58-2B-4T-bf16": Published(
            "bf16 masters", "reference, transformers, definition"
        ),
        "microsoft/bitnet-b1.58-2B-4T-gguf": Published("GGUF I2_S", "definition"),
        "mlx-community/bitnet-b1.58-2B-4T": Published(
            "packed ternary", "reference, transformers, definition"
        ),
    },
)

"""Llama (Touvron et al., arXiv 2302.13971), dense or with the ternary linears of BitNet b1.58.

Ternary checkpoints of this type are HF1BitLLM's Llama3, Falcon3 and Falcon-E, and 1bitLLM's
`BitnetForCausalLM`, which has norms before the last projection of attention and feed-forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import mlx.nn as nn

from ..channel_mixers import SwiGLU
from ..channel_mixers.gated_linear_unit import GatedLinearUnit
from ..errors import CheckpointError, UnsupportedModelError
from ..layers import RoPE
from ..token_mixers import GQA, AttentionNorms
from .parts.architecture import Architecture, GGUFForm
from .parts.architectures import find
from .parts.block import Block
from .parts.decoder import Decoder
from .parts.fields import boolean, integer, number, refuse_unless, section
from .parts.initialization import draw_weights
from .parts.rotation import Rotation
from .parts.ternary_linears import TernaryLinears, linear_of

PACKED_FORMS = ("mmfree", "bitnet", "affine")

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


def weight_names(attention_norm: str, feed_forward_norm: str) -> dict[str, str | None]:
    """Hub names to ours, given what the Hub calls the norms before the last projections."""
    names: dict[str, str | None] = {
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm.weight": "blocks.{}.token_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.channel_norm.weight",
        f"model.layers.{{}}.{attention_norm}.weight": "blocks.{}.token_mixer.output_norm.weight",
        f"model.layers.{{}}.{feed_forward_norm}.weight": "blocks.{}.channel_mixer.hidden_norm.weight",
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
        "model.norm.weight": "norm.weight",
        "lm_head": "head",
        "lm_head.rms_norm": "head.norm",
    }
    for hub, ours in LINEARS.items():
        names[f"model.layers.{{}}.{hub}"] = f"blocks.{{}}.{ours}"
        names[f"model.layers.{{}}.{hub}.rms_norm"] = f"blocks.{{}}.{ours}.norm"
    return names


WEIGHT_NAMES = weight_names("self_attn.inner_attn_ln", "mlp.ffn_layernorm")

# Keys of this and kindred architectures that change the mathematics, with the value that is meant.
_FIXED = {
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "partial_rotary_factor": 1.0,
    "quant_bits": 0,
    "rope_interleaved": False,
    "rotary_pct": 1.0,
    "use_parallel_residual": False,
    "weight_bits": 1,
    "input_bits": 8,
}


@dataclass(frozen=True)
class Config:
    """The architecture of one model.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Model dims D.
        num_hidden_layers: Number of blocks.
        intermediate_size: Width of the channel mixer.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads.
        head_dim: Dims of a head.
        rms_norm_eps: Epsilon of all norms but those inside linears.
        rotation: Rotary positions.
        linears: What ternary linears compute; `None`: all are dense.
        has_sub_norms: A norm before the last projection of attention and feed-forward.
        attention_bias: Whether the projections of attention have a bias.
        mlp_bias: Whether those of the feed-forward have one.
        tie_word_embeddings: The head reads the embedding's weight.
        max_position_embeddings: The longest text of training, where dynamic scaling begins.
        initializer_range: Standard deviation of freshly made weights.
    """

    model_type: ClassVar[str] = "llama"
    default_theta: ClassVar[float] = 10000.0

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rotation: Rotation = field(default_factory=Rotation)
    linears: TernaryLinears | None = None
    has_sub_norms: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                "[config.json] 'num_key_value_heads' must divide 'num_attention_heads' but got "
                f"{self.num_key_value_heads} for {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"[config.json] 'head_dim' must be even, for rotary positions, but got {self.head_dim}."
            )
        if self.rotation.factors and len(self.rotation.factors) != self.head_dim // 2:
            raise CheckpointError(
                f"[config.json] 'short_factor' must hold {self.head_dim // 2} numbers, one for each "
                f"pair of a head's dims, but has {len(self.rotation.factors)}."
            )
        if self.rotation.scaling == "yarn" and self.rotation.theta <= 1:
            raise CheckpointError(
                f"[config.json] 'rope_theta' must be more than 1 for yarn but got "
                f"{self.rotation.theta}."
            )
        if self.rotation.scaling == "dynamic" and self.head_dim < 4:
            raise CheckpointError(
                "[config.json] 'head_dim' must be at least 4 for dynamic scaling but got "
                f"{self.head_dim}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        refuse_unless(config, {"hidden_act": "silu"})
        return cls(**cls.read_fields(config))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that `from_hub` takes from the keys of all architectures of this family."""
        refuse_unless(config, _FIXED)
        config = _without_copy(config)
        dims = integer(config, "hidden_size", high=2**17)
        heads = integer(config, "num_attention_heads", high=2**12)
        if config.get("head_dim") is None and dims % heads:
            raise CheckpointError(
                "[config.json] 'num_attention_heads' must divide 'hidden_size' unless 'head_dim' is "
                f"given but got {heads} for {dims}."
            )
        sizes = {key: value for key, value in config.items() if value is not None}
        return {
            "vocab_size": integer(config, "vocab_size", high=2**24),
            "hidden_size": dims,
            "num_hidden_layers": integer(config, "num_hidden_layers", high=1024),
            "intermediate_size": integer(config, "intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": integer(sizes, "num_key_value_heads", heads, high=2**12),
            "head_dim": integer(sizes, "head_dim", dims // heads, high=2**12),
            "rms_norm_eps": number(config, "rms_norm_eps", 1e-6, low=1e-12, high=1.0),
            "rotation": Rotation.from_hub(config, cls.default_theta),
            "linears": cls._linears(config),
            "has_sub_norms": cls._has_sub_norms(config),
            "attention_bias": boolean(config, "attention_bias", False),
            "mlp_bias": boolean(config, "mlp_bias", False),
            "tie_word_embeddings": boolean(config, "tie_word_embeddings", False),
            "max_position_embeddings": integer(config, "max_position_embeddings", 2048, high=2**40),
            "initializer_range": number(config, "initializer_range", 0.02, low=0.0, high=10.0),
        }

    @classmethod
    def _has_sub_norms(cls, config: Mapping[str, Any]) -> bool:
        architectures = config.get("architectures")
        return isinstance(architectures, list) and "BitnetForCausalLM" in architectures

    @classmethod
    def _linears(cls, config: Mapping[str, Any]) -> TernaryLinears | None:
        linears = TernaryLinears.from_hub(config)
        if linears is None and cls._has_sub_norms(config):
            return TernaryLinears()
        if linears is None and config.get("weight_bits") is not None:
            raise UnsupportedModelError(
                "[config.json] 'weight_bits' must come with 'quantization_config' or with the "
                "architecture BitnetForCausalLM, which say what is ternary, but came alone."
            )
        return linears

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this architecture, read back by `from_hub`."""
        config = {
            "model_type": self.model_type,
            "architectures": [self._hub_class],
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            **self.rotation.to_hub(),
        }
        if self.linears is not None:
            config["quantization_config"] = self.linears.to_hub()
        return config

    @property
    def _hub_class(self) -> str:
        return "BitnetForCausalLM" if self.has_sub_norms else "LlamaForCausalLM"


def _without_copy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a `quantization_config` that only repeats `quantization`, as MLX writes it.

    It says how weights are stored, not what linears compute.
    """
    described = section(config, "quantization_config")
    if config.get("quantization") is None or "quant_method" in described:
        return config
    return {key: value for key, value in config.items() if key != "quantization_config"}


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training form."""
    return build_transformer(config)


def build_transformer(
    config: Config, *, gated: type[GatedLinearUnit] = SwiGLU, qk_norm_eps: float | None = None
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
    config: Config,
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


def mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> str | None:
    """As `Architecture.mlx_lm`: mlx-lm knows Llama in sizes of whole groups."""
    is_known = True
    if ternary_dims:
        is_plain = config.linears is not None and config.linears.norm_eps is None
        has_groups = all(dims % 32 == 0 for dims in ternary_dims)
        is_known = is_plain and has_groups and not config.has_sub_norms
    return "" if is_known else "ternary_transformer.py"


def why_not_in_transformers(config: Config) -> str | None:
    """As `Architecture.transformers`."""
    if config.has_sub_norms:
        return "its Llama would leave out the norms before the last projections"
    return None


def _as_in_transformers(config: Config) -> Any:
    """Its BitNet has the norms before the last projections that its Llama has not."""
    heads_dims = config.num_attention_heads * config.head_dim
    if not config.has_sub_norms or heads_dims != config.hidden_size or config.mlp_bias:
        return config
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    return find("bitnet").config(**given, hidden_act="silu")


TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

ARCHITECTURE = Architecture(
    name="llama",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    packed_forms=PACKED_FORMS,
    may_hold_masters=True,
    is_ternarizable=True,
    mlx_lm=mlx_lm_file,
    transformers=why_not_in_transformers,
    as_in_transformers=_as_in_transformers,
    gguf={
        "llama": GGUFForm({"model_type": "llama"}, rotates_pairs=True),
        "bitnet": GGUFForm(
            {"model_type": "llama", "architectures": ["BitnetForCausalLM"]},
            ("self_attn.inner_attn_ln", "mlp.ffn_layernorm"),
            is_ternary=True,
        ),
    },
    gguf_name=lambda config: "bitnet" if config.has_sub_norms else "llama",
    tiny=TINY,
    presets={
        "falcon3-1b": {
            "model_type": "llama",
            "vocab_size": 131072,
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "intermediate_size": 8192,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000042.0,
            "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "bitnet"},
            "torch_dtype": "bfloat16",
        }
    },
)

"""Qwen3 with a mixture of experts (Yang et al., arXiv 2505.09388) in place of the feed-forward.

CAT-Q's ternary GGUF files of it are of this type. The weights of the chosen experts are divided by their
sum, which GGUF files of `qwen3moe` do not say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..channel_mixers import MixtureOfExperts
from ..errors import UnsupportedModelError
from . import qwen3
from .parts import experts
from .parts.architecture import Architecture, GGUFFormat, draw_weights
from .parts.fields import agreed, integer, key
from .parts.stack import Decoder
from .parts.transformer import TINY, build_transformer

_FIXED: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
"""Every layer has experts, and the weights of those that are chosen are divided by their sum."""


@dataclass(frozen=True)
class Config(qwen3.Config):
    """The description of one model."""

    model_type: ClassVar[str] = "qwen3_moe"
    hub_class: ClassVar[str] = "Qwen3MoeForCausalLM"
    embedder_class: ClassVar[str | None] = None
    fixed: ClassVar[Mapping[str, Any]] = {
        **qwen3.Config.fixed,
        **_FIXED,
    }

    hidden_size: int = key("Model dims D.", integer, 2048, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 24, high=1024)
    intermediate_size: int = key("Width of a layer without experts.", integer, 6144)
    num_key_value_heads: int = key("Key and value heads.", integer, 4, high=2**12)
    head_dim: int = key("Dims of a head.", integer, None, high=2**12)
    num_experts: int = key("Experts of a layer.", integer, 128, high=2**12)
    num_experts_per_tok: int = key("Experts that a token is given.", integer, 8, high=2**12)
    moe_intermediate_size: int = key("Width of an expert.", integer, 768, high=2**17)

    def __post_init__(self) -> None:
        super().__post_init__()
        experts.check_experts(self)
        if self.linears is not None or self.mlp_bias:
            asked = "mlp_bias" if self.linears is None else "quantization_config"
            raise UnsupportedModelError(
                f"[config.json] {asked!r} must be absent for 'model_type' 'qwen3_moe' but is given. "
                "Other models of this type are not implemented."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        # where it is missing, transformers does not divide
        if config.get("norm_topk_prob") is not True:
            raise UnsupportedModelError(
                "[config.json] 'norm_topk_prob' must be true for 'model_type' 'qwen3_moe' but got "
                f"{config.get('norm_topk_prob')!r:.40}. Other models of this type are not implemented."
            )
        # transformers 5 writes it under another name
        names = ("num_experts", "num_local_experts")
        count = agreed({f"'{name}'": config.get(name) for name in names})
        return super().from_hub({**config, **({} if count is None else {names[0]: count})})

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), **_FIXED}


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    model = build_transformer(config, qk_norm_eps=config.rms_norm_eps)
    for block in model.blocks:
        mixture = MixtureOfExperts(
            config.hidden_size,
            hidden_dims=config.moe_intermediate_size,
            num_experts=config.num_experts,
            num_chosen=config.num_experts_per_tok,
        )
        block.channel_mixer = draw_weights(mixture, config.initializer_range)
    return model


WEIGHT_NAMES = {
    **{name: ours for name, ours in qwen3.WEIGHT_NAMES.items() if ".mlp." not in name},
    **experts.WEIGHT_NAMES,
}


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """Like `Architecture.mlx_lm`: mlx-lm knows it without biases."""
    return None if config.attention_bias or ternary_dims else False


def _why_not_in_transformers(config: Config) -> str | None:
    """Like `Architecture.transformers`."""
    return "it stores each expert for itself, and here all experts of a layer are one tensor"


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    packed_formats=("mmfree", "affine"),
    mlx_lm=_needs_mlx_lm_file,
    transformers=_why_not_in_transformers,
    gguf={
        "qwen3moe": GGUFFormat(
            {"model_type": "qwen3_moe", **_FIXED},
            names=experts.GGUF_NAMES,
            own_keys=tuple(experts.GGUF_KEYS),
            read=experts.read_gguf,
            write=experts.write_gguf,
        )
    },
    gguf_name=lambda config: "qwen3moe",
    tiny={
        **TINY,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        **_FIXED,
    },
    why_no_base=experts.WHY_NO_BASE,
)

"""Maple (DeepGrove): a mixture of experts whose matrices are ternary by row.

Layers see a window of tokens, or all of them and no positions; heads are rotated in part. What the
experts hold of a checkpoint may be a tensor each, or one for all.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import mlx.nn as nn

from ..channel_mixers import MixtureOfExperts
from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers.attention.options import AttentionNorms, KeyValueCache
from ..layers.dense import Linear
from ..layers.norms import RMSNorm
from ..token_mixers import GQA
from .parts import experts
from .parts.architecture import Architecture, GGUFFormat, Published, draw_weights
from .parts.block import Block
from .parts.fields import integer, key, number
from .parts.stack import Decoder
from .parts.transformer import TINY, TransformerConfig, weight_names

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The description of one Maple."""

    model_type: ClassVar[str] = "maple"
    hub_class: ClassVar[str] = "MapleForCausalLM"
    # not known what its own code takes where it is missing
    default_theta: ClassVar[float | None] = None
    fixed: ClassVar[Mapping[str, Any]] = {
        **{k: v for k, v in TransformerConfig.fixed.items() if k != "partial_rotary_factor"},
        "attention_bias": False,
        "mlp_bias": False,
        "moe_router_enable_expert_bias": False,
        "nope_on_global_attention": True,
        "norm_topk_prob": True,
        "num_shared_experts": 0,
        "use_bias": False,
        "use_qk_norm": True,
    }

    layer_types: tuple[str, ...] = declare("For each layer, which tokens it sees.", ())
    sliding_window: int = key("Tokens that a window holds.", integer, 512, high=2**31 - 1)
    partial_rotary_factor: float = key(
        "The share of a head's dims that is rotated, the first.", number, 0.5, low=1e-3, high=1.0
    )
    num_experts: int = key("Experts of a layer.", integer, 256, high=2**12)
    num_experts_per_tok: int = key("Experts that a token is given.", integer, 8)
    moe_intermediate_size: int = key("Width of an expert.", integer, 512, high=2**17)
    swiglu_limit: float = key("The bound of gate and up.", number, 7.0, low=1e-3, high=1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        experts.check_experts(self)
        if self.rotary_dims % 2 or self.rotary_dims != self.head_dim * self.partial_rotary_factor:
            raise CheckpointError(
                "[config.json] 'partial_rotary_factor' must give an even number of the "
                f"{self.head_dim} dims of a head but got {self.partial_rotary_factor}."
            )
        if self.rotation.scaling != "default" or self.linears is not None:
            asked = "rope_scaling" if self.linears is None else "quantization_config"
            raise UnsupportedModelError(
                f"[config.json] {asked!r} must be absent for 'model_type' 'maple' but is given. Other "
                "models of this type are not implemented."
            )

    @property
    def rotary_dims(self) -> int:
        """The dims of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        found = super().from_hub({k: v for k, v in config.items() if k != "layer_types"})
        kinds, count = config.get("layer_types"), found.num_hidden_layers
        if not isinstance(kinds, list | tuple) or len(kinds) != count:
            raise CheckpointError(
                f"[config.json] 'layer_types' must name the kind of each of the {count} layers but got "
                f"{kinds!r:.100}."
            )
        if other := next((kind for kind in kinds if kind not in (SLIDING, FULL)), None):
            raise UnsupportedModelError(
                f"[config.json] 'layer_types' must be {SLIDING} or {FULL} but got {other!r:.80}."
            )
        return replace(found, layer_types=tuple(kinds))

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "layer_types": list(self.layer_types)}


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    dims, eps = config.hidden_size, config.rms_norm_eps
    rope, window = config.rotation.build(config.rotary_dims), KeyValueCache(config.sliding_window)
    blocks = [
        Block(
            dims,
            GQA(
                dims,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rope=rope if kind == SLIDING else None,
                norms=AttentionNorms(eps),
                cache=window if kind == SLIDING else KeyValueCache(),
            ),
            MixtureOfExperts(
                dims,
                hidden_dims=config.moe_intermediate_size,
                num_experts=config.num_experts,
                num_chosen=config.num_experts_per_tok,
                limit=config.swiglu_limit,
            ),
            norm_eps=eps,
        )
        for kind in config.layer_types
    ]
    is_tied, vocabulary = config.tie_word_embeddings, config.vocab_size
    head = None if is_tied else Linear(dims, vocabulary, bias=False)
    model = Decoder(nn.Embedding(vocabulary, dims), blocks, RMSNorm(dims, eps), head, config)
    return draw_weights(model, config.initializer_range)


def _newer_name(name: str, names: Collection[str]) -> str:
    """MLX's own format of it has a scale for each row beside codes of 2 bits."""
    return (
        f"{name.removesuffix('.row_alpha')}.weight_scale" if name.endswith(".row_alpha") else name
    )


_NAMES = {
    **{
        name: ours
        for name, ours in weight_names().items()
        if name != "model.embed_tokens" and ".mlp." not in name
    },
    "model.word_embeddings": "embed",
    "model.layers.{}.self_attn.q_norm.weight": "blocks.{}.token_mixer.query_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blocks.{}.token_mixer.key_norm.weight",
    **experts.WEIGHT_NAMES,
    "lm_head_flash": None,
}

_GGUF_KEYS = (
    *experts.GGUF_KEYS,
    *("attention.sliding_window", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "swiglu_clamp_exp"),
)


def _read_gguf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Like `GGUFFormat.read`."""
    pattern = given["attention.sliding_window_pattern"]
    pattern = pattern if isinstance(pattern, list) else [pattern] * integer(given, "block_count")
    head_dim = integer(given, "attention.key_length", None)
    return {
        **experts.read_gguf(given),
        "sliding_window": given["attention.sliding_window"],
        "layer_types": [SLIDING if is_sliding else FULL for is_sliding in pattern],
        "partial_rotary_factor": integer(given, "rope.dimension_count") / head_dim,
        "swiglu_limit": given["swiglu_clamp_exp"],
    }


def _write_gguf(config: Config) -> dict[str, Any]:
    """Like `GGUFFormat.write`."""
    layers = config.layer_types
    return {
        **experts.write_gguf(config),
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in layers],
        "rope.dimension_count": config.rotary_dims,
        "swiglu_clamp_exp": [config.swiglu_limit] * len(layers),
    }


ARCHITECTURE = Architecture(
    name="maple",
    config=Config,
    build=build,
    weight_names=_NAMES,
    newer_name=_newer_name,
    packed_formats=("mmfree", "affine"),
    why_no_base=experts.WHY_NO_BASE,
    gguf={
        "maple": GGUFFormat(
            {"model_type": "maple"},
            names={
                "token_embd.weight": "model.word_embeddings.weight",
                **experts.GGUF_NAMES,
            },
            own_keys=_GGUF_KEYS,
            read=_read_gguf,
            write=_write_gguf,
        )
    },
    gguf_name=lambda config: "maple",
    tiny={
        **TINY,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "sliding_window": 4,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    published={"deepgrove/maple-20b-a1b": Published("16-bit, ternary by row", "definition")},
)

"""The description of a transformer of the family around Llama."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ...errors import CheckpointError, UnsupportedModelError
from ...files.declared import declare
from .fields import (
    HubConfig,
    boolean,
    integer,
    key,
    meant_activation,
    number,
    section,
    standard_deviation,
)
from .rotation import Rotation
from .ternary_linears import TernaryLinears

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
class TransformerConfig(HubConfig):
    """The description of one model of the family.

    What transformers takes for absent keys are the defaults of its Llama.
    """

    fixed: ClassVar[Mapping[str, Any]] = _FIXED
    default_theta: ClassVar[float | None] = 10000.0

    vocab_size: int = key("Number of tokens V.", integer, 32000, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 4096, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 32, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, 11008)
    num_attention_heads: int = key("Query heads.", integer, 32, high=2**12)
    num_key_value_heads: int = key("Key and value heads.", integer, None, high=2**12)
    head_dim: int = key("Dims of a head.", integer, None, high=2**12)
    rms_norm_eps: float = key(
        "Epsilon of all norms but those inside linears.", number, 1e-6, low=1e-12, high=1.0
    )
    rotation: Rotation = declare("Rotary positions.", Rotation())
    linears: TernaryLinears | None = declare(
        "What ternary linears compute; `None`: all are dense.", None
    )
    has_sub_norms: bool = declare(
        "A norm before the last projection of attention and feed-forward.", False
    )
    hidden_act: str = key(
        "Activation of the feed-forward's gate.", meant_activation, "silu", supported=("silu",)
    )
    attention_bias: bool = key("Whether the projections of attention have a bias.", boolean, False)
    mlp_bias: bool = key("Whether those of the feed-forward have one.", boolean, False)
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    max_position_embeddings: int = key(
        "The longest text of training, where dynamic scaling begins.", integer, 2048, high=2**40
    )
    initializer_range: float = standard_deviation()

    def __post_init__(self) -> None:
        dims, heads = self.hidden_size, self.num_attention_heads
        self.fill("num_key_value_heads", heads)
        if not self.head_dim and dims % heads:
            raise CheckpointError(
                "[config.json] 'num_attention_heads' must divide 'hidden_size' unless 'head_dim' is "
                f"given but got {heads} for {dims}."
            )
        self.fill("head_dim", dims // heads)
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
        _refuse_windows(config)
        config = _without_copy(config)
        found = cls.read_keys(config)
        has_sub_norms = cls._has_sub_norms(config)
        usual = TernaryLinears() if has_sub_norms else None
        length = {"max_position_embeddings": found["max_position_embeddings"]}
        return cls(
            **found,
            rotation=Rotation.from_hub({**length, **config}, cls.default_theta),
            linears=TernaryLinears.from_hub(config) or usual,
            has_sub_norms=has_sub_norms,
        )

    @classmethod
    def _has_sub_norms(cls, config: Mapping[str, Any]) -> bool:
        return cls.has_sub_norms

    def to_hub(self) -> dict[str, Any]:
        config = {**super().to_hub(), **self.rotation.to_hub()}
        if self.linears is not None:
            config["quantization_config"] = self.linears.to_hub()
        return config

    def with_dense(self, names: Iterable[str]) -> Self:
        """The same with these ternary linears dense, by their Hub names."""
        linears = None if self.linears is None else self.linears.without(names)
        return replace(self, linears=linears)


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuses layers that see a window of tokens, of which mlx-lm's Llama takes notice."""
    kinds = config.get("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise UnsupportedModelError(
            f"[config.json] 'layer_types' must be full_attention for all layers but got {kinds!r:.100}. "
            "Other layers are not implemented."
        )


def _without_copy(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a `quantization_config` that only repeats `quantization`, as MLX writes it.

    It says how weights are stored, not what linears compute.
    """
    described = section(config, "quantization_config")
    if config.get("quantization") is None or "quant_method" in described:
        return config
    return {key: value for key, value in config.items() if key != "quantization_config"}

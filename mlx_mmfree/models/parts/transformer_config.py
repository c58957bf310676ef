"""The description of a transformer of the family around Llama."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ...errors import CheckpointError, UnsupportedModelError
from .fields import activation, boolean, integer, number, refuse_unless, section
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
class TransformerConfig:
    """The description of one model of the family.

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

    model_type: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
    }
    """What transformers takes for keys that a `config.json` leaves out; these are its Llama's."""
    default_theta: ClassVar[float | None] = 10000.0

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
        activation(config, "hidden_act", ("silu",), "silu")
        return cls(**cls.read_fields(config))

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that all architectures of the family take from the keys of a `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        refuse_unless(config, _FIXED)
        _refuse_windows(config)
        config = {**cls.defaults, **_without_copy(config)}
        dims = integer(config, "hidden_size", high=2**17)
        heads = integer(config, "num_attention_heads", high=2**12)
        if config["head_dim"] is None and dims % heads:
            raise CheckpointError(
                "[config.json] 'num_attention_heads' must divide 'hidden_size' unless 'head_dim' is "
                f"given but got {heads} for {dims}."
            )
        by_heads = {"num_key_value_heads": heads, "head_dim": dims // heads}
        config |= {key: value for key, value in by_heads.items() if config[key] is None}
        return {
            "vocab_size": integer(config, "vocab_size", high=2**24),
            "hidden_size": dims,
            "num_hidden_layers": integer(config, "num_hidden_layers", high=1024),
            "intermediate_size": integer(config, "intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": integer(config, "num_key_value_heads", high=2**12),
            "head_dim": integer(config, "head_dim", high=2**12),
            "rms_norm_eps": number(config, "rms_norm_eps", low=1e-12, high=1.0),
            "rotation": Rotation.from_hub(config, cls.default_theta),
            "linears": cls._linears(config),
            "has_sub_norms": cls._has_sub_norms(config),
            "attention_bias": boolean(config, "attention_bias"),
            "mlp_bias": boolean(config, "mlp_bias"),
            "tie_word_embeddings": boolean(config, "tie_word_embeddings"),
            "max_position_embeddings": integer(config, "max_position_embeddings", high=2**40),
            "initializer_range": number(config, "initializer_range", low=0.0, high=10.0),
        }

    @classmethod
    def _has_sub_norms(cls, config: Mapping[str, Any]) -> bool:
        return False

    @classmethod
    def _linears(cls, config: Mapping[str, Any]) -> TernaryLinears | None:
        linears = TernaryLinears.from_hub(config)
        return TernaryLinears() if linears is None and cls._has_sub_norms(config) else linears

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

    def with_dense(self, names: Iterable[str]) -> Self:
        """The same with these ternary linears dense, by their Hub names."""
        linears = None if self.linears is None else self.linears.without(names)
        return replace(self, linears=linears)

    @property
    def _hub_class(self) -> str:
        """The name in `architectures`."""
        raise NotImplementedError


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

"""The text models of Gemma 3 (Gemma Team, arXiv 2503.19786): most layers see a window of a text alone.

The smaller of BitNet's models that embed texts is of this type, with a norm in each of its ternary
linears.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import mlx.core as mx

from ..channel_mixers.gated_linear_unit import GatedLinearUnit
from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers.attention.options import KeyValueCache
from ..layers.norms import store_less_one
from ..ops.activations import gelu_tanh
from .parts import transformer
from .parts.architecture import Architecture, Published
from .parts.embedder import embedder_names
from .parts.fields import activation, agreed, boolean, integer, key, number, section
from .parts.rotation import Rotation
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS

SLIDING, FULL = "sliding_attention", "full_attention"
_LAYER = "model.layers.{}."

WEIGHT_NAMES = transformer.weight_names() | {
    f"{_LAYER}self_attn.q_norm.weight": "blocks.{}.token_mixer.query_norm.weight",
    f"{_LAYER}self_attn.k_norm.weight": "blocks.{}.token_mixer.key_norm.weight",
    f"{_LAYER}post_attention_layernorm.weight": "blocks.{}.token_output_norm.weight",
    f"{_LAYER}pre_feedforward_layernorm.weight": "blocks.{}.channel_norm.weight",
    f"{_LAYER}post_feedforward_layernorm.weight": "blocks.{}.channel_output_norm.weight",
}


class _GeGLU(GatedLinearUnit):
    """Feed-forward with the approximation of GELU, which no kernel has."""

    gate = None

    def mix(self, g: mx.array, u: mx.array) -> mx.array:
        return gelu_tanh(g) * u


@dataclass(frozen=True)
class Config(transformer.TransformerConfig):
    """The description of one text model."""

    model_type: ClassVar[str] = "gemma3_text"
    hub_class: ClassVar[str] = "Gemma3ForCausalLM"
    embedder_class: ClassVar[str | None] = "Gemma3TextModel"
    fixed: ClassVar[Mapping[str, Any]] = {
        **transformer.TransformerConfig.fixed,
        "mlp_bias": False,
        "use_bidirectional_attention": False,
    }
    default_theta: ClassVar[float | None] = 1e6

    vocab_size: int = key("Number of tokens V.", integer, 262208, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 2304, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 26, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, 9216)
    num_attention_heads: int = key("Query heads.", integer, 8, high=2**12)
    num_key_value_heads: int = key("Key and value heads.", integer, 4, high=2**12)
    head_dim: int = key("Dims of a head.", integer, 256, high=2**12)
    rotation: Rotation = declare("Rotary positions of layers that see all.", Rotation(1e6))
    hidden_act: str = key(
        "Activation of the feed-forward's gate.",
        activation,
        "gelu_pytorch_tanh",
        names=("hidden_activation",),
        supported=("gelu_tanh",),
    )
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, True)
    max_position_embeddings: int = key("The longest text of training.", integer, 131072, high=2**40)
    query_pre_attn_scalar: int = key("Scores are divided by its root.", integer, 256)
    sliding_window: int = key("Tokens that a layer with a window sees.", integer, 4096, high=2**30)
    local_theta: float = key(
        "Base of the wavelengths of layers with a window.",
        number,
        1e4,
        names=("rope_local_base_freq",),
        low=1.0,
        high=1e15,
    )
    layer_types: tuple[str, ...] = declare("For each layer, sliding or full attention.", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_types:
            object.__setattr__(self, "layer_types", _layer_types(self.num_hidden_layers, 6))
        if self.rotation.scaling not in ("default", "linear"):
            raise UnsupportedModelError(
                "[config.json] the type in 'rope_scaling' must be default or linear for this "
                f"architecture but got {self.rotation.scaling!r}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        kinds = _read_layers(config)
        # whatever all layers see is checked by the family
        found = super().from_hub(_with_one_rotation({**config, "layer_types": None}))
        return replace(found, layer_types=kinds)

    def to_hub(self) -> dict[str, Any]:
        config = {**super().to_hub(), "layer_types": list(self.layer_types)}
        for interval in range(1, len(self.layer_types) + 1):
            if self.layer_types == _layer_types(len(self.layer_types), interval):
                # by which mlx-lm knows the kinds of layers
                config["sliding_window_pattern"] = interval
                break
        return config


def _layer_types(count: int, interval: int) -> tuple[str, ...]:
    return tuple(SLIDING if (n + 1) % interval else FULL for n in range(count))


def _read_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    count = integer(config, "num_hidden_layers", 26, high=1024)
    # transformers writes what it does not show
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    given = agreed({f"'{name}'": config.get(name) for name in names})
    pattern = {} if given is None else {names[0]: given}
    interval = integer(pattern, names[0], 6, high=2**16)
    kinds = config.get("layer_types")
    if kinds is None:
        return _layer_types(count, interval)
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in (SLIDING, FULL) for kind in kinds)
    ):
        raise CheckpointError(
            f"[config.json] 'layer_types' must name {SLIDING} or {FULL} for each of the {count} layers "
            f"but got {kinds!r:.100}."
        )
    return tuple(kinds)


def _with_one_rotation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys with one section of rotary positions, of two by the kinds of layers."""
    both = section(config, "rope_parameters")
    if not both.keys() & {SLIDING, FULL}:
        return config
    sliding = section(both, SLIDING)
    if sliding.get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"[config.json] 'rope_type' of '{SLIDING}' must be default but got "
            f"{sliding['rope_type']!r:.80}. Other positions of such layers are not implemented."
        )
    bases = {
        f"'rope_theta' of '{SLIDING}'": sliding.get("rope_theta"),
        "'rope_local_base_freq'": config.get("rope_local_base_freq"),
    }
    local = agreed(bases)
    return {
        **config,
        "rope_parameters": dict(section(both, FULL)),
        **({} if local is None else {"rope_local_base_freq": local}),
    }


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    # with queries that are scaled, scores are divided by the root of another number than of dims
    factor = (config.head_dim / config.query_pre_attn_scalar) ** 0.25
    local = Rotation(config.local_theta)
    full, sliding = (
        replace(each, attention_factor=each.attention_factor * factor).build(config.head_dim)
        for each in (config.rotation, local)
    )
    window = KeyValueCache(config.sliding_window)
    kinds: dict[str, dict[str, Any]] = {
        FULL: {"rope": full},
        SLIDING: {"rope": sliding, "cache": window},
    }
    model = transformer.build_transformer(
        config,
        gated=_GeGLU,
        qk_norm_eps=config.rms_norm_eps,
        norm_order="sandwich",
        attention=[kinds[kind] for kind in config.layer_types],
    )
    model.embed_scale = math.sqrt(config.hidden_size)
    store_less_one(model.norm)
    for block in model.blocks:
        mixer = block.token_mixer
        norms = (block.token_norm, block.token_output_norm, mixer.query_norm, mixer.key_norm)
        for norm in (*norms, block.channel_norm, block.channel_output_norm):
            store_less_one(norm)
    return model


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """Like `Architecture.mlx_lm`: mlx-lm knows Gemma 3 as it is published, and embeds nothing."""
    is_even = "sliding_window_pattern" in config.to_hub()
    is_published = is_even and config.tie_word_embeddings and not config.attention_bias
    if (
        config.is_embedder
        or not is_published
        or transformer.needs_mlx_lm_file(config, ternary_dims)
    ):
        return None
    return False


ARCHITECTURE = Architecture(
    name="gemma3_text",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    newer_name=embedder_names,
    packed_formats=PACKED_FORMATS,
    is_ternarizable=True,
    why_no_base="its blocks have a norm after each mixer too, and rotations that differ by layer",
    # activations of its models go beyond float16
    needs_range=True,
    mlx_lm=_needs_mlx_lm_file,
    transformers=lambda config: None,
    tiny={**transformer.TINY, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    published={"microsoft/bitnet-embedding-270m": Published("16-bit masters", "reference")},
)

"""A transformer of the Llama family with other token mixers in place of its attention.

It is what distillation makes of a transformer: embedding, norms, feed-forward and head are the
base's, and each layer has a mixer by name.
"""

from collections.abc import Sequence

from ..layers.mixer import LinearFactory
from .parts.architecture import Architecture, draw_weights, find
from .parts.mixers import MixerChoice, MixerPositions
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS, TernaryLinears, linear_of
from .parts.transformer import ATTENTION, TINY, HybridConfig

_IN_MLX_LM = (ATTENTION, "gla", "hgrn2", "mlgru", "sliding_window_attention")
"""Mixers of the file with which mlx-lm runs a hybrid."""


class _MixerLinears(dict[str, LinearFactory]):
    """Makes each projection of a mixer, by its name."""

    def __init__(self, linears: TernaryLinears | None, path: str):
        super().__init__()
        self._linears = linears
        self._path = path

    def __missing__(self, name: str) -> LinearFactory:
        return linear_of(self._linears, f"{self._path}.{name}")


def build(config: HybridConfig) -> Decoder:
    """A model with fresh weights, in its training variant.

    Raises:
        CheckpointError: An option of a mixer does not fit.
        UnsupportedModelError: A mixer is unknown, or is not causal.
    """
    base = config.base
    model: Decoder = find(base.model_type).build(base)
    for number, (block, choice) in enumerate(zip(model.blocks, config.token_mixers, strict=True)):
        if choice != MixerChoice(ATTENTION):
            mixer = choice.token_mixer(
                base.hidden_size,
                linear=_MixerLinears(base.linears, f"model.layers.{number}.token_mixer"),
                is_causal=True,
                max_length=base.max_position_embeddings,
                positions=MixerPositions("rope", rope=base.rotation.build),
            )
            block.token_mixer = draw_weights(mixer, base.initializer_range)
    model.config = config
    return model


def _needs_mlx_lm_file(config: HybridConfig, ternary_dims: Sequence[int]) -> bool | None:
    """Like `Architecture.mlx_lm`."""
    is_known = all(choice.name in _IN_MLX_LM for choice in config.token_mixers)
    return True if is_known else None


ARCHITECTURE = Architecture(
    name="hybrid",
    config=HybridConfig,
    build=build,
    weight_names={
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm": "blocks.{}.token_norm",
        "model.layers.{}.token_mixer": "blocks.{}.token_mixer",
        "model.layers.{}.post_attention_layernorm": "blocks.{}.channel_norm",
        "model.layers.{}.mlp": "blocks.{}.channel_mixer",
        "model.norm": "norm",
        "lm_head": "head",
    },
    packed_formats=PACKED_FORMATS,
    is_ternarizable=True,
    needs_range=True,
    mlx_lm=_needs_mlx_lm_file,
    tiny={
        **TINY,
        "base_model_type": "llama",
        "token_mixer": ["mlgru", ATTENTION],
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        },
    },
)

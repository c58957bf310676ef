"""Models of any token mixers and any channel mixer (MetaFormer, Yu et al., arXiv 2111.11418).

A `config.json`, or the section `model` of a training file, names the mixers. `mmfree mixers` lists them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, UnsupportedModelError
from ..layers import BitLinear
from ..layers.attention.positions import AddedPositions, LearnedPositions, SinusoidalPositions
from ..layers.mixer import LinearFactory
from ..layers.norms import LayerNorm
from .parts.architecture import Architecture, Pipeline
from .parts.block import Block
from .parts.decoder import Decoder
from .parts.encoder_decoder import EncoderDecoder
from .parts.initialization import draw_weights
from .parts.masked_lm import MaskedLM
from .parts.metaformer_config import Config
from .parts.mixer_choice import MixerChoice, MixerPositions
from .parts.reversible import ReversibleBlock
from .parts.sequence_classifier import SequenceClassifier
from .parts.stack import Stack
from .parts.token_model import TokenModel

_NORMS = {"rms_norm": nn.RMSNorm, "layer_norm": LayerNorm}
_PIPELINES: dict[str, Pipeline] = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "classifier": "text-classification",
    "encoder_decoder": "translation",
}
_LINEARS: dict[str, LinearFactory] = {
    "dense": nn.Linear,
    "ternary": partial(BitLinear, norm_eps=1e-6),
}


def build(config: Config) -> TokenModel:
    """A model with fresh weights, in its training form.

    Raises:
        CheckpointError: An option of a mixer does not fit.
        UnsupportedModelError: A mixer is unknown, or cannot do what the task asks of it.
    """
    dims, eps = config.hidden_size, config.norm_eps
    # norms behind the sums stand behind the last one too (arXiv 1706.03762)
    is_post = config.norm_order == "post"
    norm = nn.Identity if is_post else partial(_NORMS[config.norm], dims, eps=eps)
    is_causal = config.task in ("causal_lm", "encoder_decoder")
    has_memory = config.task == "encoder_decoder"
    blocks = _blocks(config, config.token_mixer, config.num_hidden_layers, is_causal, has_memory)
    embed = nn.Embedding(config.vocab_size, dims)
    head = None
    if config.task == "classifier":
        head = nn.Linear(dims, config.num_labels)
    elif not config.tie_word_embeddings:
        head = nn.Linear(dims, config.vocab_size, bias=False)
    arguments: tuple[Any, ...] = (blocks, norm(), head, config, _positions(config))
    model: TokenModel
    if config.task == "classifier":
        model = SequenceClassifier(embed, *arguments, pooling=config.pooling)
    elif has_memory:
        model = EncoderDecoder(embed, _encoder(config, norm()), *arguments)
    else:
        model = (Decoder if is_causal else MaskedLM)(embed, *arguments)
    draw_weights(model, config.initializer_range)
    if config.scale_embedding:
        embed.weight = mx.random.normal(embed.weight.shape, scale=dims**-0.5)
    return model


def _encoder(config: Config, norm: nn.Module) -> Stack:
    choices = config.encoder_token_mixer or config.token_mixer
    blocks = _blocks(config, choices, config.encoder_layers, False, False)
    return Stack(blocks, norm, _positions(config))


def _blocks(
    config: Config,
    choices: Sequence[MixerChoice],
    count: int,
    is_causal: bool,
    has_memory: bool,
) -> list[Block | ReversibleBlock]:
    positions = MixerPositions(config.positions, config.rope_theta)
    if positions.is_bias and not any(choice.takes(positions) for choice in choices):
        raise positions.refusal(choices[0].name)
    return [
        _block(config, choices[n % len(choices)], positions, is_causal, has_memory)
        for n in range(count)
    ]


def _block(
    config: Config,
    choice: MixerChoice,
    positions: MixerPositions,
    is_causal: bool,
    has_memory: bool,
) -> Block | ReversibleBlock:
    dims, linear = config.hidden_size, _LINEARS[config.linear_class]
    make = partial(
        MixerChoice.token_mixer,
        dims=dims,
        linear=linear,
        max_length=config.max_position_embeddings,
    )
    mixers = (
        make(choice, is_causal=is_causal, positions=positions),
        config.channel_mixer.channel_mixer(
            dims, linear=linear, hidden_dims=config.intermediate_size
        ),
    )
    norm, eps = _NORMS[config.norm], config.norm_eps
    if config.block == "reversible":
        _check_reversible(config)
        return ReversibleBlock(dims, *mixers, norm=norm, norm_eps=eps)
    memory_mixer = None
    if has_memory:
        memory_mixer = make(config.memory_mixer, is_causal=False)
        if not memory_mixer.cross:
            raise UnsupportedModelError(
                "[config.json] 'memory_mixer' must read a second sequence but "
                f"{config.memory_mixer.name} cannot. mmfree mixers lists those that can."
            )
    return Block(
        dims,
        *mixers,
        memory_mixer=memory_mixer,
        norm=norm,
        norm_eps=eps,
        norm_order=config.norm_order,
    )


def _check_reversible(config: Config) -> None:
    for name, only in (("norm_order", "pre"), ("task", None)):
        value = getattr(config, name)
        if value != only and (only is not None or value == "encoder_decoder"):
            raise UnsupportedModelError(
                f"[config.json] 'block' must be residual with '{name}' {value!r} but got 'reversible'."
            )


def _positions(config: Config) -> AddedPositions | None:
    dims = config.hidden_size
    scale = dims**0.5 if config.scale_embedding else 1.0
    if config.positions == "sinusoidal":
        if dims % 2:
            raise CheckpointError(
                f"[config.json] 'hidden_size' must be even for sinusoidal positions but got {dims}."
            )
        return AddedPositions(dims, SinusoidalPositions(dims), scale=scale)
    if config.positions == "learned":
        rows = config.max_position_embeddings
        return AddedPositions(dims, LearnedPositions(dims, max_length=rows), scale=scale)
    if config.scale_embedding:
        raise CheckpointError(
            "[config.json] 'scale_embedding' must be false where no positions are added but got "
            f"'positions' {config.positions!r}."
        )
    return None


ARCHITECTURE = Architecture(
    name="metaformer",
    config=Config,
    build=build,
    weight_names={
        "model.embed": "embed",
        "model.positions": "positions",
        "model.layers.{}": "blocks.{}",
        "model.norm": "norm",
        "model.encoder.layers.{}": "encoder.blocks.{}",
        "model.encoder.positions": "encoder.positions",
        "model.encoder.norm": "encoder.norm",
        "lm_head": "head",
    },
    does=lambda config: _PIPELINES[config.task],
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "token_mixer": ["mlgru", "mlgru", {"name": "gqa", "num_heads": 4}],
        "linear_class": "ternary",
        "positions": "rope",
    },
)

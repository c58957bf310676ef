"""Models of any token mixers and any channel mixer (MetaFormer, Yu et al., arXiv 2111.11418).

A `config.json`, or the section `model` of a training file, names the mixers. `mmfree mixers` lists them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers import BitLinear
from ..layers.attention.positions import AddedPositions, LearnedPositions, SinusoidalPositions
from ..layers.dense import Linear
from ..layers.mixer import LinearFactory
from ..layers.norms import LayerNorm, RMSNorm
from .parts.architecture import Architecture, Pipeline, draw_weights
from .parts.block import Block, NormOrder
from .parts.encoders import EncoderDecoder, MaskedLM, Pooling, SequenceClassifier
from .parts.fields import (
    HubConfig,
    boolean,
    integer,
    key,
    number,
    one_of,
    token_id,
    usual_word,
    weight_std,
)
from .parts.mixers import MixerChoice, MixerPositions, read_choices
from .parts.reversible import ReversibleBlock
from .parts.stack import Decoder, Stack, TokenModel


def _labels(config: Mapping[str, Any], key: str, default: object) -> tuple[str, ...]:
    value = config.get(key)
    if value is None:
        return ()
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not is_list or len(set(value)) < len(value):
        raise CheckpointError(
            f"[config.json] '{key}' must be a list of different names but got {value!r:.100}."
        )
    return tuple(value)


def _choice(config: Mapping[str, Any], key: str, default: MixerChoice) -> MixerChoice:
    return default if config.get(key) is None else MixerChoice.read(key, config[key])


def _choices(config: Mapping[str, Any], key: str, default: Any) -> tuple[MixerChoice, ...]:
    if default is not MISSING and config.get(key) is None:
        return ()
    if key not in config:
        raise CheckpointError(f"[config.json] '{key}' must be given but is missing.")
    return read_choices(key, config[key])


def _plain(choices: tuple[MixerChoice, ...]) -> list[str | dict[str, Any]] | None:
    return [choice.plain() for choice in choices] or None


@dataclass(frozen=True)
class Config(HubConfig):
    """The mixers and sizes of one model."""

    model_type: ClassVar[str] = "metaformer"

    vocab_size: int = key("Number of tokens V.", integer, high=2**24)
    hidden_size: int = key("Model dims D.", integer, high=2**17)
    num_hidden_layers: int = key(
        "Number of blocks; of an encoder-decoder, those that read the target.", integer, high=1024
    )
    token_mixer: tuple[MixerChoice, ...] = key(
        "The token mixer of all blocks, or several, which repeat from block to block: three of `mlgru` "
        "and one of `sliding_window_attention` make a hybrid. Options stand beside `name`.",
        _choices,
        writer=_plain,
    )
    channel_mixer: MixerChoice = key(
        "The channel mixer.", _choice, MixerChoice("swiglu"), writer=MixerChoice.plain
    )
    task: str = one_of(
        "What the model is for.", "causal_lm", "masked_lm", "classifier", "encoder_decoder"
    )
    encoder_layers: int = declare("Blocks that read the source of an encoder-decoder.", 0)
    encoder_token_mixer: tuple[MixerChoice, ...] = key(
        "Their token mixers. Default: `token_mixer`.", _choices, (), writer=_plain
    )
    memory_mixer: MixerChoice = key(
        "What mixes the source into the target.",
        _choice,
        MixerChoice("multi_head_attention"),
        writer=MixerChoice.plain,
    )
    intermediate_size: int | None = key(
        "Width of the channel mixer. Default: its own.", integer, None
    )
    max_position_embeddings: int = key(
        "Positions of the longest sequence, for what must know.", integer, 2048, high=2**20
    )
    positions: str = one_of(
        "What tells positions apart beside the mixers: codes that are added, the rotation of queries "
        "and keys in mixers that have it, or a term of scores by the distance. Mixers without scores "
        "cannot take that one; only those whose state has a constant size may stand beside mixers that "
        "can.",
        *("none", "sinusoidal", "learned", "rope", "alibi", "relative_bias"),
    )
    rope_theta: float = key("Base of that rotation.", number, 10000.0, low=1.0, high=1e12)
    block: str = one_of(
        "Kind of the blocks. Training keeps no activations of reversible ones.",
        "residual",
        "reversible",
    )
    norm: str = one_of("Kind of the norms.", "rms_norm", "layer_norm")
    norm_eps: float = key("Their epsilon.", number, 1e-6, low=1e-12, high=1.0)
    norm_order: NormOrder = one_of(
        "Whether they stand before the mixers or after the sums.", "pre", "post"
    )
    num_labels: int = key("Classes of a classifier.", integer, 2, high=2**20)
    labels: tuple[str, ...] = key("Their names.", _labels, (), writer=list)
    pooling: Pooling = key(
        "Which vector of a text it looks at.", usual_word, "mean", among=("first", "last", "mean")
    )
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, True)
    linear_class: str = one_of(
        "Kind of the linears of the blocks. Embedding and head are dense.", "dense", "ternary"
    )
    scale_embedding: bool = key(
        "Embedded tokens are multiplied by the root of D before positions are added, and fresh ones "
        "have a standard deviation of one over it, as in tensor2tensor.",
        boolean,
        False,
    )
    initializer_range: float = weight_std()
    eos_token_id: int = key(
        "The token that ends a text; of a vocabulary that `mmfree train` makes is 0. An "
        "encoder-decoder begins its target with it too.",
        token_id,
        0,
    )
    num_beams: int = key("Beams that an encoder-decoder searches with.", integer, 1, high=1024)

    def __post_init__(self) -> None:
        if self.labels and self.num_labels != len(self.labels):
            raise CheckpointError(
                f"[config.json] 'num_labels' must be the number of 'labels', {len(self.labels)}, but "
                f"got {self.num_labels}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        labels = config.get("labels")
        count = len(labels) if isinstance(labels, list) and labels else 2
        found = cls.read_keys({"num_labels": count, **config})
        if found["task"] == "encoder_decoder":
            found["encoder_layers"] = integer(config, "encoder_layers", 1, high=1024)
        return cls(**found)

    def to_hub(self) -> dict[str, Any]:
        own = {"model_type": self.model_type, "encoder_layers": self.encoder_layers}
        return own | self.write_keys()


_NORMS = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}
_PIPELINES: dict[str, Pipeline] = {
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "classifier": "text-classification",
    "encoder_decoder": "translation",
}
_LINEARS: dict[str, LinearFactory] = {
    "dense": Linear,
    "ternary": partial(BitLinear, norm_eps=1e-6),
}


def build(config: Config) -> TokenModel:
    """A model with fresh weights, in its training variant.

    Raises:
        CheckpointError: An option of a mixer does not fit.
        UnsupportedModelError: A mixer is unknown, or cannot do what the task asks of it.
    """
    dims, eps = config.hidden_size, config.norm_eps
    # norms after the sums follow the last one too (arXiv 1706.03762)
    is_post = config.norm_order == "post"
    norm = nn.Identity if is_post else partial(_NORMS[config.norm], dims, eps=eps)
    is_causal = config.task in ("causal_lm", "encoder_decoder")
    has_memory = config.task == "encoder_decoder"
    blocks = _blocks(config, config.token_mixer, config.num_hidden_layers, is_causal, has_memory)
    embed = nn.Embedding(config.vocab_size, dims)
    head = None
    if config.task == "classifier":
        head = Linear(dims, config.num_labels)
    elif not config.tie_word_embeddings:
        head = Linear(dims, config.vocab_size, bias=False)
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

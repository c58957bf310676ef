"""Models of any token mixers and any channel mixer (MetaFormer, Yu et al., arXiv 2111.11418).

A `config.json`, or the section `model` of a training file, names the mixers. `mmfree mixers` lists them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError, UnsupportedModelError
from ..layers import BitLinear
from ..layers.added_positions import AddedPositions
from ..layers.linear_factory import LinearFactory
from ..layers.position_codes import LearnedPositions, SinusoidalPositions
from .parts.architecture import Architecture
from .parts.block import Block, NormOrder
from .parts.decoder import Decoder
from .parts.encoder_decoder import EncoderDecoder
from .parts.fields import boolean, integer, number
from .parts.initialization import draw_weights
from .parts.masked_lm import MaskedLM
from .parts.mixer_choice import MixerChoice, read_choices
from .parts.sequence_classifier import Pooling, SequenceClassifier
from .parts.stack import Stack
from .parts.token_model import TokenModel

_NORMS = {"rms_norm": nn.RMSNorm, "layer_norm": nn.LayerNorm}
_LINEARS: dict[str, LinearFactory] = {
    "dense": nn.Linear,
    "ternary": partial(BitLinear, norm_eps=1e-6),
}
_CHOICES = {
    "task": ("causal_lm", "masked_lm", "classifier", "encoder_decoder"),
    "norm": tuple(_NORMS),
    "norm_order": ("pre", "post"),
    "positions": ("none", "sinusoidal", "learned", "rope"),
    "pooling": ("first", "last", "mean"),
    "linear_class": tuple(_LINEARS),
}


@dataclass(frozen=True)
class Config:
    """The mixers and sizes of one model.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Model dims D.
        num_hidden_layers: Number of blocks; of an encoder-decoder, those that read the target.
        token_mixer: The token mixer of all blocks, or several, which repeat from block to block: three
            of `mlgru` and one of `sliding_window_attention` make a hybrid. Options stand beside `name`.
        channel_mixer: The channel mixer.
        task: What the model is for.
        encoder_layers: Blocks that read the source of an encoder-decoder.
        encoder_token_mixer: Their token mixers. Default: `token_mixer`.
        memory_mixer: What mixes the source into the target.
        intermediate_size: Width of the channel mixer. Default: its own.
        max_position_embeddings: Positions of the longest sequence, for what must know.
        positions: What tells positions apart beside the mixers: codes that are added, or the rotation
            of queries and keys in mixers that have it.
        rope_theta: Base of that rotation.
        norm: Kind of the norms.
        norm_eps: Their epsilon.
        norm_order: Whether they stand before the mixers or behind the sums.
        num_labels: Classes of a classifier.
        labels: Their names.
        pooling: Which vector of a text it looks at.
        tie_word_embeddings: The head reads the embedding's weight.
        linear_class: Kind of the linears of the blocks. Embedding and head are dense.
        scale_embedding: Embedded tokens are multiplied by the root of D before positions are added, and
            fresh ones have a standard deviation of one over it, as in tensor2tensor.
        initializer_range: Standard deviation of freshly made weights.
        eos_token_id: The token that ends a text; that of a vocabulary that `mmfree train` makes is 0.
            An encoder-decoder begins its target with it too.
        num_beams: Beams that an encoder-decoder searches with.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    token_mixer: tuple[MixerChoice, ...]
    channel_mixer: MixerChoice = field(default_factory=lambda: MixerChoice("swiglu"))
    task: str = "causal_lm"
    encoder_layers: int = 0
    encoder_token_mixer: tuple[MixerChoice, ...] = ()
    memory_mixer: MixerChoice = field(default_factory=lambda: MixerChoice("multi_head_attention"))
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    positions: str = "none"
    rope_theta: float = 10000.0
    norm: str = "rms_norm"
    norm_eps: float = 1e-6
    norm_order: NormOrder = "pre"
    num_labels: int = 2
    labels: tuple[str, ...] = ()
    pooling: Pooling = "mean"
    tie_word_embeddings: bool = True
    linear_class: str = "dense"
    scale_embedding: bool = False
    initializer_range: float = 0.02
    eos_token_id: int = 0
    num_beams: int = 1

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "Config":
        """Reads the keys of a `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A word is unknown.
        """
        if "token_mixer" not in config:
            raise CheckpointError("[config.json] 'token_mixer' must be given but is missing.")
        mixers = read_choices("token_mixer", config["token_mixer"])
        encoder = config.get("encoder_token_mixer")
        hidden_dims = config.get("intermediate_size")
        given: dict[str, Any] = {
            name: _word(config, name) for name in _CHOICES if config.get(name) is not None
        }
        for name in ("channel_mixer", "memory_mixer"):
            if config.get(name) is not None:
                given[name] = MixerChoice.read(name, config[name])
        is_pair = given.get("task") == "encoder_decoder"
        labels = _labels(config.get("labels"))
        num_labels = integer(config, "num_labels", len(labels) or 2, high=2**20)
        if labels and num_labels != len(labels):
            raise CheckpointError(
                f"[config.json] 'num_labels' must be the number of 'labels', {len(labels)}, but got "
                f"{num_labels}."
            )
        vocab_size = integer(config, "vocab_size", high=2**24)
        return cls(
            vocab_size=vocab_size,
            hidden_size=integer(config, "hidden_size", high=2**17),
            num_hidden_layers=integer(config, "num_hidden_layers", high=1024),
            token_mixer=mixers,
            encoder_layers=integer(config, "encoder_layers", 1, high=1024) if is_pair else 0,
            encoder_token_mixer=()
            if encoder is None
            else read_choices("encoder_token_mixer", encoder),
            intermediate_size=None if hidden_dims is None else integer(config, "intermediate_size"),
            max_position_embeddings=integer(config, "max_position_embeddings", 2048, high=2**20),
            rope_theta=number(config, "rope_theta", 10000.0, low=1.0, high=1e12),
            norm_eps=number(config, "norm_eps", 1e-6, low=1e-12, high=1.0),
            num_labels=num_labels,
            labels=labels,
            tie_word_embeddings=boolean(config, "tie_word_embeddings", True),
            scale_embedding=boolean(config, "scale_embedding", False),
            initializer_range=number(config, "initializer_range", 0.02, low=0.0, high=10.0),
            eos_token_id=integer(config, "eos_token_id", 0, low=0, high=vocab_size - 1),
            num_beams=integer(config, "num_beams", 1, high=1024),
            **given,
        )

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` that `from_hub` reads back."""
        return {
            "model_type": "metaformer",
            **asdict(self),
            "labels": list(self.labels),
            "token_mixer": [choice.plain() for choice in self.token_mixer],
            "encoder_token_mixer": [choice.plain() for choice in self.encoder_token_mixer] or None,
            "channel_mixer": self.channel_mixer.plain(),
            "memory_mixer": self.memory_mixer.plain(),
        }


def _labels(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not is_list or len(set(value)) < len(value):  # type: ignore[call-overload, arg-type]
        raise CheckpointError(
            f"[config.json] 'labels' must be a list of different names but got {value!r:.100}."
        )
    return tuple(value)  # type: ignore[arg-type]


def _word(config: Mapping[str, Any], name: str) -> str:
    value = config[name]
    if value not in _CHOICES[name]:
        raise UnsupportedModelError(
            f"[config.json] '{name}' must be one of {', '.join(_CHOICES[name])} but got {value!r:.100}."
        )
    return str(value)


def build(config: Config) -> TokenModel:
    """A model with fresh weights, in its training form.

    Raises:
        CheckpointError: An option of a mixer does not fit.
        UnsupportedModelError: A mixer is unknown, or cannot do what the task asks of it.
    """
    dims, eps = config.hidden_size, config.norm_eps
    norm = partial(_NORMS[config.norm], dims, eps=eps)
    is_causal = config.task in ("causal_lm", "encoder_decoder")
    has_memory = config.task == "encoder_decoder"
    blocks = [
        _block(config, config.token_mixer[n % len(config.token_mixer)], is_causal, has_memory)
        for n in range(config.num_hidden_layers)
    ]
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
    blocks = [
        _block(config, choices[n % len(choices)], False, False)
        for n in range(config.encoder_layers)
    ]
    return Stack(blocks, norm, _positions(config))


def _block(config: Config, choice: MixerChoice, is_causal: bool, has_memory: bool) -> Block:
    dims, linear = config.hidden_size, _LINEARS[config.linear_class]
    make = partial(
        MixerChoice.token_mixer,
        dims=dims,
        linear=linear,
        max_length=config.max_position_embeddings,
    )
    rope_base = config.rope_theta if config.positions == "rope" else None
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
        make(choice, is_causal=is_causal, rope_base=rope_base),
        config.channel_mixer.channel_mixer(
            dims, linear=linear, hidden_dims=config.intermediate_size
        ),
        memory_mixer=memory_mixer,
        norm=_NORMS[config.norm],
        norm_eps=config.norm_eps,
        norm_order=config.norm_order,
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

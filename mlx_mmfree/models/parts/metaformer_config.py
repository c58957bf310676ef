"""The description of a model of any mixers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .block import NormOrder
from .fields import boolean, integer, number
from .mixer_choice import MixerChoice, read_choices
from .sequence_classifier import Pooling

_CHOICES = {
    "task": ("causal_lm", "masked_lm", "classifier", "encoder_decoder"),
    "norm": ("rms_norm", "layer_norm"),
    "norm_order": ("pre", "post"),
    "positions": ("none", "sinusoidal", "learned", "rope", "alibi", "relative_bias"),
    "block": ("residual", "reversible"),
    "pooling": ("first", "last", "mean"),
    "linear_class": ("dense", "ternary"),
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
        positions: What tells positions apart beside the mixers: codes that are added, the rotation of
            queries and keys in mixers that have it, or a term of scores by the distance. Mixers without
            scores cannot take that one; only those whose state has a constant size may stand beside
            mixers that can.
        rope_theta: Base of that rotation.
        block: Kind of the blocks. Training keeps no activations of reversible ones.
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
    block: str = "residual"
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

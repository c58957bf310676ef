"""The description of a model of any mixers."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Self

from ...errors import CheckpointError
from ...files.declared import declare
from .block import NormOrder
from .fields import (
    HubConfig,
    boolean,
    integer,
    key,
    number,
    one_of,
    standard_deviation,
    token_id,
    usual_word,
)
from .mixer_choice import MixerChoice, read_choices
from .sequence_classifier import Pooling


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
        "Whether they stand before the mixers or behind the sums.", "pre", "post"
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
    initializer_range: float = standard_deviation()
    eos_token_id: int = key(
        "The token that ends a text; that of a vocabulary that `mmfree train` makes is 0. An "
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

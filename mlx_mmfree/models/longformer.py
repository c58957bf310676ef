"""Longformer (Beltagy et al., arXiv 2004.05150): an encoder whose tokens see what is near."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import CheckpointError
from ..files.declared import declare
from ..token_mixers.longformer import Longformer
from .parts.architecture import Architecture, Copy, Published
from .parts.bert import ATTENTION_NAMES, TINY, AttentionConfig, Bert, Front, weight_names
from .parts.fields import integer, key, token_id

_LINEARS = {
    **ATTENTION_NAMES,
    "attention.self.query_global": "token_mixer.global_query_proj",
    "attention.self.key_global": "token_mixer.global_key_proj",
    "attention.self.value_global": "token_mixer.global_value_proj",
}


@dataclass(frozen=True)
class Config(AttentionConfig):
    """The description of one Longformer."""

    model_type: ClassVar[str] = "longformer"
    hub_class: ClassVar[str] = "LongformerForMaskedLM"

    vocab_size: int = 30522
    hidden_act: str = "gelu"
    attention_window: tuple[int, ...] = declare(
        "For each block, how many tokens are near: half on each side.", ()
    )
    pad_token_id: int = key("Positions count on from the row after this one.", token_id, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_position_embeddings < self.pad_token_id + 2:
            raise CheckpointError(
                "[config.json] 'max_position_embeddings' must leave a row after the row of padding, "
                f"{self.pad_token_id}, but got {self.max_position_embeddings}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        found = cls.read_keys(config)
        windows = _windows(config.get("attention_window", 512), found["num_hidden_layers"])
        return cls(**found, attention_window=windows)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "attention_window": list(self.attention_window)}


def _windows(value: Any, layers: int) -> tuple[int, ...]:
    windows = list(value) if isinstance(value, list | tuple) else [value] * layers
    windows = [integer({"attention_window": window}, "attention_window") for window in windows]
    if len(windows) != layers or any(window % 2 for window in windows):
        raise CheckpointError(
            "[config.json] 'attention_window' must be an even number from 2, or one for each of the "
            f"{layers} layers, but got {value!r:.100}."
        )
    return tuple(windows)


def build(config: Config) -> Bert:
    """A model with fresh weights."""
    mixers = [
        Longformer(
            config.hidden_size,
            window=window // 2 + 1,
            num_global=0,
            num_heads=config.num_attention_heads,
            bias=True,
        )
        for window in config.attention_window
    ]
    return Bert(config, Front(config, offset=config.pad_token_id + 1), list(mixers))


ARCHITECTURE = Architecture(
    name="longformer",
    config=Config,
    build=build,
    weight_names={
        **weight_names("longformer", _LINEARS),
        "lm_head.dense": "head_proj",
        "lm_head.layer_norm": "head_norm",
        "lm_head.bias": "logits_bias",
        "lm_head.decoder": Copy("embed"),
        "lm_head.decoder.bias": Copy("logits_bias"),
    },
    does=lambda config: "fill-mask",
    tiny={**TINY, "num_attention_heads": 4, "attention_window": 4},
    published={"allenai/longformer-{base,large}-4096": Published("float32", "transformers")},
)

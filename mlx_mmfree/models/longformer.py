"""Longformer (Beltagy et al., arXiv 2004.05150): an encoder whose tokens see what is near."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import CheckpointError
from ..token_mixers.longformer import Longformer
from .parts.architecture import Architecture, Copy
from .parts.bert import (
    ATTENTION_NAMES,
    TINY,
    Bert,
    BertConfig,
    Front,
    heads_of,
    weight_names,
)
from .parts.fields import integer

_LINEARS = {
    **ATTENTION_NAMES,
    "attention.self.query_global": "token_mixer.global_query_proj",
    "attention.self.key_global": "token_mixer.global_key_proj",
    "attention.self.value_global": "token_mixer.global_value_proj",
}


@dataclass(frozen=True)
class Config(BertConfig):
    """The description of one Longformer.

    Attributes: as `BertConfig`, and
        num_attention_heads: Heads.
        attention_window: For each block, how many tokens are near: half on each side.
        pad_token_id: Positions count on from the row after this one.
    """

    model_type: ClassVar[str] = "longformer"
    architecture: ClassVar[str] = "LongformerForMaskedLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        **BertConfig.defaults,
        "vocab_size": 30522,
        "hidden_act": "gelu",
        "attention_window": 512,
        "pad_token_id": 1,
    }

    num_attention_heads: int = 12
    attention_window: tuple[int, ...] = ()
    pad_token_id: int = 1

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().read_fields(config)
        pad = integer(config, "pad_token_id", low=0, high=fields["vocab_size"] - 1)
        if fields["max_position_embeddings"] < pad + 2:
            raise CheckpointError(
                "[config.json] 'max_position_embeddings' must leave a row behind that of padding, "
                f"{pad}, but got {fields['max_position_embeddings']}."
            )
        return fields | {
            "num_attention_heads": heads_of(config, fields["hidden_size"]),
            "attention_window": _windows(config, fields["num_hidden_layers"]),
            "pad_token_id": pad,
        }


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    value = config["attention_window"]
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
)

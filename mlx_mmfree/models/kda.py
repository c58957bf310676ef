"""Kimi delta attention (Kimi Team, arXiv 2510.26692) as in flash-linear-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import CheckpointError
from ..token_mixers import KDA
from .parts.architecture import Architecture, Published
from .parts.fields import key, number
from .parts.recurrent import DELTA_RULE_NAMES, TINY, DeltaRuleConfig, build_recurrent, weight_names
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(DeltaRuleConfig):
    """The description of one KDA."""

    model_type: ClassVar[str] = "kda"
    hub_class: ClassVar[str] = "KDAForCausalLM"

    lower_bound: float | None = key(
        "The least logarithm of a gate; `None`: there is none.", number, None, low=-100, high=-1e-3
    )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        if config.get("safe_gate") and config.get("lower_bound") is None:
            # as flash-linear-attention does
            raise CheckpointError(
                "[config.json] 'lower_bound' must be given where 'safe_gate' is true but is missing. "
                "Give the bound, below 0, that the model was trained with."
            )
        return super().from_hub(config)

    def of_mixer(self) -> dict[str, Any]:
        return {**super().of_mixer(), "lower_bound": self.lower_bound}


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    return build_recurrent(config, lambda: KDA(**config.of_mixer()), Decoder)


ARCHITECTURE = Architecture(
    name="kda",
    config=Config,
    build=build,
    weight_names=weight_names(
        {
            **DELTA_RULE_NAMES,
            "f_proj.0": "decay_down_proj",
            "f_proj.1": "decay_proj",
            "A_log": "decay_log",
            "dt_bias": "step_bias",
            "g_proj.0": "gate_down_proj",
            "g_proj.1": "gate_proj",
        }
    ),
    tiny={**TINY, "num_heads": 2, "head_dim": 16},
    published={"fla-hub/kda-*": Published("16-bit", "reference")},
)

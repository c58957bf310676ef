"""Gated DeltaNet (Yang et al., arXiv 2412.06464) as in flash-linear-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..token_mixers import GatedDeltaNet
from .parts.architecture import Architecture, Published
from .parts.fields import integer, key, number
from .parts.recurrent import DELTA_RULE_NAMES, TINY, DeltaRuleConfig, build_recurrent, weight_names
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(DeltaRuleConfig):
    """The description of one Gated DeltaNet."""

    model_type: ClassVar[str] = "gated_deltanet"
    hub_class: ClassVar[str] = "GatedDeltaNetForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        **DeltaRuleConfig.fixed,
        "use_gate": True,
        "output_gate_activation": "swish",
    }

    num_hidden_layers: int = key("Number of blocks.", integer, 21, high=1024)
    num_heads: int = key("Heads of queries and keys.", integer, 6)
    head_dim: int = key("Dims of a key.", integer, 256)
    expand_v: float = key("Dims of a value over dims of a key.", number, 2.0, low=1e-3, high=64)


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    return build_recurrent(config, lambda: GatedDeltaNet(**config.of_mixer()), Decoder)


ARCHITECTURE = Architecture(
    name="gated_deltanet",
    config=Config,
    build=build,
    weight_names=weight_names(
        {
            **DELTA_RULE_NAMES,
            "a_proj": "decay_proj",
            "A_log": "decay_log",
            "dt_bias": "step_bias",
            "g_proj": "gate_proj",
        }
    ),
    tiny={**TINY, "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5},
    published={"fla-hub/gated_deltanet-*": Published("16-bit", "reference")},
)

"""DeltaNet (Yang et al., arXiv 2406.06484) as in flash-linear-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..token_mixers import DeltaNet
from .parts.architecture import Architecture, Published
from .parts.fields import boolean, integer, key
from .parts.recurrent import DELTA_RULE_NAMES, TINY, ExpandedConfig, build_recurrent, weight_names
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(ExpandedConfig):
    """The description of one DeltaNet."""

    model_type: ClassVar[str] = "delta_net"
    hub_class: ClassVar[str] = "DeltaNetForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        **ExpandedConfig.fixed,
        "use_short_conv": True,
        "use_beta": True,
        "use_output_norm": True,
        "qk_norm": "l2",
        "qk_activation": "silu",
    }

    num_heads: int = 16
    conv_size: int = key("Taps of the convolutions.", integer, 4, high=1024)
    use_gate: bool = key("The output is gated.", boolean, False)
    allow_neg_eigval: bool = key("Twice as much is replaced.", boolean, False)

    def of_mixer(self) -> dict[str, Any]:
        return {
            **super().of_mixer(),
            "conv_size": self.conv_size,
            "use_gate": self.use_gate,
            "allow_negative": self.allow_neg_eigval,
        }


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    return build_recurrent(config, lambda: DeltaNet(**config.of_mixer()), Decoder)


ARCHITECTURE = Architecture(
    name="delta_net",
    config=Config,
    build=build,
    weight_names=weight_names({**DELTA_RULE_NAMES, "g_proj": "gate_proj"}),
    tiny={**TINY, "num_heads": 2},
    published={"fla-hub/delta_net-*": Published("16-bit", "reference")},
)

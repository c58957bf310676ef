"""RetNet (Sun et al., arXiv 2307.08621) as in flash-linear-attention."""

from dataclasses import dataclass
from typing import ClassVar

from ..token_mixers import RetNet
from .parts.architecture import Architecture, Published
from .parts.recurrent import TINY, ExpandedConfig, build_recurrent, weight_names
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(ExpandedConfig):
    """The description of one RetNet."""

    model_type: ClassVar[str] = "retnet"
    hub_class: ClassVar[str] = "RetNetForCausalLM"
    hidden_ratio: ClassVar[int] = 2

    num_heads: int = 8
    expand_v: float = 2.0


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    return build_recurrent(config, lambda: RetNet(**config.of_mixer()), Decoder)


ARCHITECTURE = Architecture(
    name="retnet",
    config=Config,
    build=build,
    weight_names=weight_names(
        {
            "g_proj": "gate_proj",
            # the name where norm and gate are not fused
            "g_norm": "output_norm",
            "g_norm_swish_gate": "output_norm",
        }
    ),
    tiny={**TINY, "num_heads": 2},
    published={"fla-hub/retnet-*": Published("16-bit", "reference")},
)

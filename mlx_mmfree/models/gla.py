"""Gated linear attention (Yang et al., arXiv 2312.06635) as in flash-linear-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..token_mixers import GLA
from .parts.architecture import Architecture, Published
from .parts.recurrent import TINY, ExpandedConfig, build_recurrent, weight_names
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(ExpandedConfig):
    """The description of one GLA."""

    model_type: ClassVar[str] = "gla"
    hub_class: ClassVar[str] = "GLAForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        **ExpandedConfig.fixed,
        "clamp_min": None,
        "use_gk": True,
        "use_gv": False,
    }

    expand_k: float = 0.5


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    return build_recurrent(config, lambda: GLA(**config.of_mixer()), Decoder)


ARCHITECTURE = Architecture(
    name="gla",
    config=Config,
    build=build,
    weight_names=weight_names(
        {
            "gk_proj.0": "forget_down_proj",
            "gk_proj.1": "forget_proj",
            "g_proj": "gate_proj",
            # the name where norm and gate are not fused
            "g_norm": "output_norm",
            "g_norm_swish_gate": "output_norm",
        }
    ),
    tiny={**TINY, "num_heads": 2},
    published={"fla-hub/gla-*": Published("16-bit", "reference")},
)

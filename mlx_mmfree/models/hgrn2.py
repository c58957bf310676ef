"""HGRN2 (Qin et al., arXiv 2404.07904) in the form of flash-linear-attention.

The norm before the last projection has an epsilon of its own, whatever the configuration says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import CheckpointError
from ..token_mixers import HGRN2
from .parts.architecture import Architecture
from .parts.fields import boolean, integer
from .parts.lower_bounds import BoundedDecoder
from .parts.recurrent import build_recurrent, weight_names
from .parts.recurrent_config import RecurrentConfig

_OUTPUT_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Config(RecurrentConfig):
    """The description of one HGRN2.

    Attributes: as `RecurrentConfig`, and
        expand_ratio: Dims of a head.
        use_lower_bound: Forget gates of later blocks have a learned lower bound.
    """

    model_type: ClassVar[str] = "hgrn2"
    architecture: ClassVar[str] = "HGRN2ForCausalLM"

    expand_ratio: int = 128
    use_lower_bound: bool = True

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.expand_ratio

    def __post_init__(self) -> None:
        if self.hidden_size % self.expand_ratio:
            raise CheckpointError(
                f"[config.json] 'expand_ratio' must divide 'hidden_size', {self.hidden_size}, but got "
                f"{self.expand_ratio}."
            )

    @classmethod
    def mixer_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("expand_ratio", 128) is not None:
            ratio = integer(config, "expand_ratio", 128)
        else:
            dims, heads = integer(config, "hidden_size", 2048), integer(config, "num_heads")
            ratio = max(dims // heads, 1)
        return {
            "expand_ratio": ratio,
            "use_lower_bound": boolean(config, "use_lower_bound", True),
        }


def build(config: Config) -> BoundedDecoder:
    """A model with fresh weights."""

    def mixer() -> HGRN2:
        return HGRN2(config.hidden_size, num_heads=config.num_heads, norm_eps=_OUTPUT_NORM_EPS)

    model = build_recurrent(config, mixer, BoundedDecoder)
    return model.add_bounds(config.hidden_size) if config.use_lower_bound else model


ARCHITECTURE = Architecture(
    name="hgrn2",
    config=Config,
    build=build,
    weight_names={
        **weight_names(
            {"f_proj": "forget_proj", "i_proj": "input_proj", "g_norm": "output_norm"},
        ),
        "model.lower_bounds": "lower_bounds",
    },
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "expand_ratio": 8,
    },
)

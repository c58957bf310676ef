"""HGRN2 (Qin et al., arXiv 2404.07904) as in flash-linear-attention.

The norm before the last projection has an epsilon of its own, whatever the configuration says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from ..errors import CheckpointError
from ..token_mixers import HGRN2
from .parts.architecture import Architecture, Published
from .parts.fields import boolean, integer, key
from .parts.recurrent import TINY, BoundedDecoder, RecurrentConfig, build_recurrent, weight_names

_OUTPUT_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Config(RecurrentConfig):
    """The description of one HGRN2."""

    model_type: ClassVar[str] = "hgrn2"
    hub_class: ClassVar[str] = "HGRN2ForCausalLM"

    expand_ratio: int = key("Dims of a head.", integer, 128)
    use_lower_bound: bool = key(
        "Forget gates of later blocks have a learned lower bound.", boolean, True
    )

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.expand_ratio

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.expand_ratio:
            raise CheckpointError(
                f"[config.json] 'expand_ratio' must divide 'hidden_size', {self.hidden_size}, but got "
                f"{self.expand_ratio}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        if config.get("expand_ratio", 128) is None:
            dims, heads = integer(config, "hidden_size", 2048), integer(config, "num_heads")
            config = {**config, "expand_ratio": max(dims // heads, 1)}
        return super().from_hub(config)


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
    tiny={**TINY, "expand_ratio": 8},
    published={"fla-hub/hgrn2-*": Published("16-bit", "reference")},
)

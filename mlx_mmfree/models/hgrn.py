"""HGRN (Qin et al., arXiv 2311.04823) as in flash-linear-attention, which is real-valued."""

from dataclasses import dataclass
from typing import ClassVar

from ..token_mixers import HGRN
from .parts.architecture import Architecture, Published
from .parts.fields import boolean, key, number
from .parts.recurrent import TINY, BoundedDecoder, RecurrentConfig, build_recurrent, weight_names


@dataclass(frozen=True)
class Config(RecurrentConfig):
    """The description of one HGRN."""

    model_type: ClassVar[str] = "hgrn"
    hub_class: ClassVar[str] = "HGRNForCausalLM"

    expand_ratio: float = key("Width of the recurrence over D.", number, 1.0, low=1e-3, high=64)
    use_lower_bound: bool = key(
        "Forget gates of later blocks have a learned lower bound, each its own.", boolean, True
    )

    @property
    def recurrence_dims(self) -> int:
        return int(self.hidden_size * self.expand_ratio)


def build(config: Config) -> BoundedDecoder:
    """A model with fresh weights."""

    def mixer() -> HGRN:
        dims, hidden_dims = config.hidden_size, config.recurrence_dims
        return HGRN(dims, hidden_dims=hidden_dims, norm_eps=config.norm_eps)

    model = build_recurrent(config, mixer, BoundedDecoder)
    return model.add_bounds(config.recurrence_dims) if config.use_lower_bound else model


ARCHITECTURE = Architecture(
    name="hgrn",
    config=Config,
    build=build,
    weight_names={
        **weight_names(
            {
                "i_proj": "input_proj",
                "f_proj": "forget_proj",
                "g_proj": "gate_proj",
                "g_norm": "output_norm",
            }
        ),
        "model.lower_bounds": "lower_bounds",
    },
    tiny=TINY,
    published={"fla-hub/hgrn-*": Published("16-bit", "reference")},
)

"""FNet (Lee-Thorp et al., arXiv 2105.03824): an encoder whose tokens are mixed by the Fourier transform.

The published models were trained with padding that takes part; call them without `valid`.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..token_mixers.fnet import FNet
from .parts.architecture import Architecture, Published
from .parts.bert import HEAD_NAMES, TINY, Bert, BertConfig, Front, weight_names


@dataclass(frozen=True)
class Config(BertConfig):
    """The description of one FNet."""

    model_type: ClassVar[str] = "fnet"
    hub_class: ClassVar[str] = "FNetForMaskedLM"

    vocab_size: int = 32000
    type_vocab_size: int = 4


def build(config: Config) -> Bert:
    """A model with fresh weights."""
    front = Front(config, has_projection=True)
    return Bert(config, front, [FNet(config.hidden_size) for _ in range(config.num_hidden_layers)])


ARCHITECTURE = Architecture(
    name="fnet",
    config=Config,
    build=build,
    weight_names={
        **weight_names("fnet", {"fourier.output.LayerNorm": "token_norm"}),
        "fnet.embeddings.projection": "front.projection",
        **HEAD_NAMES,
    },
    does=lambda config: "fill-mask",
    tiny=TINY,
    published={"google/fnet-{base,large}": Published("float32", "transformers")},
)

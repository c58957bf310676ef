"""BitNet b1.58 2B4T (Ma et al., arXiv 2504.12285): Llama with squared ReLU and further norms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from . import llama
from .parts.decoder import Decoder
from .parts.ternary_linears import TernaryLinears

MODEL_TYPES = ("bitnet",)

QUANT_METHODS = llama.QUANT_METHODS

WEIGHT_NAMES = llama.weight_names("self_attn.attn_sub_norm", "mlp.ffn_sub_norm")


@dataclass(frozen=True)
class Config(llama.Config):
    """The architecture of one BitNet model; its linears but the head are ternary in any case.

    Attributes: as `llama.Config`.
    """

    model_type: ClassVar[str] = "bitnet"
    # silu: models of 1bitLLM in the names of transformers' BitNet
    activations: ClassVar[tuple[llama.Activation, ...]] = ("relu2", "silu")

    default_theta: ClassVar[float] = 500000.0

    linears: TernaryLinears | None = field(default_factory=TernaryLinears)
    has_sub_norms: bool = True
    hidden_act: llama.Activation = "relu2"

    @classmethod
    def _has_sub_norms(cls, config: Mapping[str, Any]) -> bool:
        return True

    @property
    def _hub_class(self) -> str:
        return "BitNetForCausalLM"


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training form."""
    return llama.build(config)

"""HGRN-bit, the MatMul-free language model (Zhu et al., arXiv 2406.02528).

Every linear, the head included, is a `BitLinear` with an RMSNorm inside (eps 1e-6) whose activation
codes round half away from zero, as in the kernel that published models were trained with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Self

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import SwiGLU
from ..channel_mixers.gated_linear_unit import default_hidden_dims
from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers import BitLinear, TiedBitLinear
from ..layers.dense import Linear
from ..layers.norms import RMSNorm
from ..token_mixers import MLGRU
from .parts.architecture import Architecture, Published, draw_weights
from .parts.block import Block
from .parts.fields import HubConfig, activation, boolean, integer, key, number, weight_std, word
from .parts.recurrent import BoundedDecoder

WEIGHT_NAMES: dict[str, str | None] = {
    "model.embeddings": "embed",
    "model.lower_bounds": "lower_bounds",
    "model.layers.{}.attn_norm.weight": "blocks.{}.token_norm.weight",
    "model.layers.{}.attn.i_proj": "blocks.{}.token_mixer.input_proj",
    "model.layers.{}.attn.f_proj": "blocks.{}.token_mixer.forget_proj",
    "model.layers.{}.attn.g_proj": "blocks.{}.token_mixer.gate_proj",
    "model.layers.{}.attn.o_proj": "blocks.{}.token_mixer.output_proj",
    "model.layers.{}.attn.g_norm.weight": "blocks.{}.token_mixer.gate_norm.weight",
    "model.layers.{}.attn.h_conv1d.weight": "blocks.{}.token_mixer.shared_conv.weight",
    "model.layers.{}.attn.i_conv1d.weight": "blocks.{}.token_mixer.input_conv.weight",
    "model.layers.{}.attn.f_conv1d.weight": "blocks.{}.token_mixer.forget_conv.weight",
    "model.layers.{}.attn.q_conv1d.weight": None,
    "model.layers.{}.mlp_norm.weight": "blocks.{}.channel_norm.weight",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.channel_mixer.gate_up_proj",
    "model.layers.{}.mlp.down_proj": "blocks.{}.channel_mixer.down_proj",
    "model.norm.weight": "norm.weight",
    "lm_head": "head",
}

_LINEAR_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Config(HubConfig):
    """The architecture of one HGRN-bit model."""

    model_type: ClassVar[str] = "hgrn_bit"
    hub_class: ClassVar[str] = "HGRNBitForCausalLM"

    vocab_size: int = key("Number of tokens V.", integer, 32000, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 2048, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 24, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, None)
    num_heads: int = key("Only reshapes the recurrence; no numerical effect.", integer, 1)
    expand_ratio: float = key("Width of the recurrence over D.", number, 1.0, low=1e-3, high=64)
    rms_norm_eps: float = key(
        "Epsilon of the norms outside the linears.", number, 1e-6, low=1e-12, high=1.0
    )
    use_lower_bound: bool = key(
        "Forget gates of later blocks have a learned lower bound.", boolean, True
    )
    conv_size: int = declare("Taps of the short convolutions; 0 means none.", 0)
    share_conv_kernel: bool = key("One convolution for all gates.", boolean, True)
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    linear_class: Literal["ternary", "dense"] = key(
        "`dense` for the same architecture with plain linears.",
        word,
        "ternary",
        among=("ternary", "dense"),
    )
    initializer_range: float = weight_std()

    @property
    def recurrence_dims(self) -> int:
        return int(self.hidden_size * self.expand_ratio)

    def __post_init__(self) -> None:
        self.fill("intermediate_size", default_hidden_dims(self.hidden_size, 4))
        if self.recurrence_dims % self.num_heads:
            raise CheckpointError(
                f"[config.json] 'num_heads' must divide the recurrence's {self.recurrence_dims} dims "
                f"but got {self.num_heads}."
            )
        is_bounded = self.use_lower_bound and self.num_hidden_layers > 1
        if is_bounded and self.recurrence_dims != self.hidden_size:
            raise UnsupportedModelError(
                "[config.json] 'expand_ratio' must be 1 with 'use_lower_bound' but got "
                f"{self.expand_ratio}: the lower bounds have 'hidden_size' columns."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        activation(config, "hidden_act", "swish", supported=("silu",))
        found = cls.read_keys(config)
        if found["intermediate_size"] is None:
            ratio = number(config, "hidden_ratio", 4, low=0.01, high=64)
            found["intermediate_size"] = default_hidden_dims(found["hidden_size"], ratio)
        if boolean(config, "use_short_conv", False):
            found["conv_size"] = integer(config, "conv_size", 4, high=256)
        return cls(**found)

    def to_hub(self) -> dict[str, Any]:
        config = super().to_hub()
        if self.linear_class == "ternary":
            del config["linear_class"]
        convolutions = {"use_short_conv": self.conv_size > 0, "conv_size": self.conv_size or 4}
        return {**config, "hidden_act": "swish", **convolutions}


class HGRNBit(BoundedDecoder):
    """A `BoundedDecoder` whose bounds are rounded to the dtype of the residual stream."""

    def bounds(self) -> mx.array:
        return super().bounds().astype(self.dtype)


def build(config: Config) -> HGRNBit:
    """A model with fresh weights, in its training variant."""
    dims, eps = config.hidden_size, config.rms_norm_eps
    recurrence_dims = config.recurrence_dims
    is_ternary = config.linear_class == "ternary"
    linear: Any = (
        partial(BitLinear, norm_eps=_LINEAR_NORM_EPS, rounding="half_away")
        if is_ternary
        else Linear
    )
    blocks = [
        Block(
            dims,
            MLGRU(
                dims,
                hidden_dims=recurrence_dims,
                linear=linear,
                norm_eps=eps,
                conv_size=config.conv_size,
                share_conv=config.share_conv_kernel,
            ),
            SwiGLU(dims, hidden_dims=config.intermediate_size, linear=linear, is_stacked=True),
            norm_eps=eps,
        )
        for _ in range(config.num_hidden_layers)
    ]
    embed = nn.Embedding(config.vocab_size, dims)
    head: nn.Module | None
    if not config.tie_word_embeddings:
        head = linear(dims, config.vocab_size, bias=False)
    elif is_ternary:
        head = TiedBitLinear(embed, norm_eps=_LINEAR_NORM_EPS, rounding="half_away")
    else:
        head = None
    model = HGRNBit(embed, blocks, RMSNorm(dims, eps=eps), head, config)
    if config.use_lower_bound:
        model.add_bounds(config.hidden_size)
    return draw_weights(model, config.initializer_range)


_PUBLISHED = {"model_type": "hgrn_bit", "vocab_size": 32000, "use_lower_bound": True}

ARCHITECTURE = Architecture(
    name="hgrn_bit",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    packed_formats=("mmfree", "affine"),
    mlx_lm=lambda config, ternary_dims: True,
    tiny={"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    presets={
        "mmfreelm-370m": _PUBLISHED | {"hidden_size": 1024, "num_hidden_layers": 24},
        "mmfreelm-1.3b": _PUBLISHED | {"hidden_size": 2048, "num_hidden_layers": 24},
        "mmfreelm-2.7b": _PUBLISHED | {"hidden_size": 2560, "num_hidden_layers": 32},
    },
    published={"ridger/MMfreeLM-{370M,1.3B,2.7B}": Published("16-bit masters", "reference")},
)

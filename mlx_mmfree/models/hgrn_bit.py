"""HGRN-bit, the MatMul-free language model (Zhu et al., arXiv 2406.02528).

Every linear, the head included, is a `BitLinear` with an RMSNorm inside (eps 1e-6) whose activation
codes round half away from zero, as in the kernel that published models were trained with.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import SwiGLU
from ..channel_mixers.gated_linear_unit import default_hidden_dims
from ..errors import CheckpointError, UnsupportedModelError
from ..layers import BitLinear, TiedBitLinear
from ..token_mixers import MLGRU
from .parts.architecture import Architecture
from .parts.block import Block
from .parts.fields import activation, boolean, integer, number
from .parts.initialization import draw_weights
from .parts.lower_bounds import BoundedDecoder

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
class Config:
    """The architecture of one HGRN-bit model.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Model dims D.
        num_hidden_layers: Number of blocks.
        intermediate_size: Width of the channel mixer.
        num_heads: Only reshapes the recurrence; no numerical effect.
        expand_ratio: Width of the recurrence over D.
        rms_norm_eps: Epsilon of the norms outside the linears.
        use_lower_bound: Forget gates of later blocks have a learned lower bound.
        conv_size: Taps of the short convolutions; 0 means none.
        share_conv_kernel: One convolution for all gates.
        tie_word_embeddings: The head reads the embedding's weight.
        linear_class: `"ternary"`, or `"dense"` for the same architecture with plain linears.
        initializer_range: Standard deviation of freshly made weights.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_heads: int = 1
    expand_ratio: float = 1.0
    rms_norm_eps: float = 1e-6
    use_lower_bound: bool = True
    conv_size: int = 0
    share_conv_kernel: bool = True
    tie_word_embeddings: bool = False
    linear_class: Literal["ternary", "dense"] = "ternary"
    initializer_range: float = 0.02

    @property
    def recurrence_dims(self) -> int:
        return int(self.hidden_size * self.expand_ratio)

    def __post_init__(self) -> None:
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
    def from_hub(cls, config: Mapping[str, Any]) -> "Config":
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        activation(config, "hidden_act", ("silu",), "swish")
        linear_class = config.get("linear_class", "ternary")
        if linear_class not in ("ternary", "dense"):
            raise UnsupportedModelError(
                f"[config.json] 'linear_class' must be ternary or dense but got {linear_class!r:.100}."
            )
        dims = integer(config, "hidden_size", 2048, high=2**17)
        if config.get("intermediate_size") is None:
            ratio = number(config, "hidden_ratio", 4, low=0.01, high=64)
            hidden_dims = default_hidden_dims(dims, ratio)
        else:
            hidden_dims = integer(config, "intermediate_size")
        uses_conv = boolean(config, "use_short_conv", False)
        return cls(
            vocab_size=integer(config, "vocab_size", 32000, high=2**24),
            hidden_size=dims,
            num_hidden_layers=integer(config, "num_hidden_layers", 24, high=1024),
            intermediate_size=hidden_dims,
            num_heads=integer(config, "num_heads", 1),
            expand_ratio=number(config, "expand_ratio", 1, low=1e-3, high=64),
            rms_norm_eps=number(config, "rms_norm_eps", 1e-6, low=1e-12, high=1.0),
            use_lower_bound=boolean(config, "use_lower_bound", True),
            conv_size=integer(config, "conv_size", 4, high=256) if uses_conv else 0,
            share_conv_kernel=boolean(config, "share_conv_kernel", True),
            tie_word_embeddings=boolean(config, "tie_word_embeddings", False),
            linear_class=linear_class,
            initializer_range=number(config, "initializer_range", 0.02, low=0.0, high=10.0),
        )

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this architecture, read back by `from_hub`."""
        config = asdict(self)
        config["use_short_conv"] = self.conv_size > 0
        config["conv_size"] = self.conv_size or 4
        if self.linear_class == "ternary":
            del config["linear_class"]
        return {
            "model_type": "hgrn_bit",
            "architectures": ["HGRNBitForCausalLM"],
            "hidden_act": "swish",
            **config,
        }


class HGRNBit(BoundedDecoder):
    """A `BoundedDecoder` whose bounds are rounded to the dtype of the residual stream."""

    def bounds(self) -> mx.array:
        return super().bounds().astype(self.dtype)


def build(config: Config) -> HGRNBit:
    """A model with fresh weights, in its training form."""
    dims, eps = config.hidden_size, config.rms_norm_eps
    is_ternary = config.linear_class == "ternary"
    linear: Any = (
        partial(BitLinear, norm_eps=_LINEAR_NORM_EPS, rounding="half_away")
        if is_ternary
        else nn.Linear
    )
    blocks = [
        Block(
            dims,
            MLGRU(
                dims,
                hidden_dims=config.recurrence_dims,
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
    model = HGRNBit(embed, blocks, nn.RMSNorm(dims, eps=eps), head, config)
    if config.use_lower_bound:
        model.add_bounds(config.hidden_size)
    return draw_weights(model, config.initializer_range)


_PUBLISHED = {"model_type": "hgrn_bit", "vocab_size": 32000, "use_lower_bound": True}

ARCHITECTURE = Architecture(
    name="hgrn_bit",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    mlx_lm=lambda config, ternary_dims: "hgrn_bit.py",
    tiny={"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    presets={
        "mmfreelm-370m": _PUBLISHED | {"hidden_size": 1024, "num_hidden_layers": 24},
        "mmfreelm-1.3b": _PUBLISHED | {"hidden_size": 2048, "num_hidden_layers": 24},
        "mmfreelm-2.7b": _PUBLISHED | {"hidden_size": 2560, "num_hidden_layers": 32},
    },
)

r"""MiniCPM and MiniCPM4 (Hu et al., arXiv 2404.06395; arXiv 2506.07900): Llama with three scales.

.. math::
    h_0 = e\,\mathrm{embed}(t), \qquad
    h_{l+1} = h_l + b\,\mathrm{mixer}(\mathrm{norm}(h_l)), \qquad
    z = W\,\mathrm{norm}(h)\,d_0 / D

with `scale_emb` :math:`e`, `scale_depth` :math:`s`, :math:`b = s/\sqrt{L}` for L layers, and
`dim_model_base` :math:`d_0`. Here the residual stream is :math:`h/b`: mixers are added to it as they
are, it begins with :math:`e/b`, and the epsilon of its norms is :math:`\epsilon/b^2`.

BitCPM-CANN's ternary models of this type store floats, in which each group of 128 inputs has one size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .parts import transformer
from .parts.architecture import Architecture, GGUFFormat, Published
from .parts.fields import integer, key, number
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS


@dataclass(frozen=True)
class Config(transformer.TransformerConfig):
    """The description of one MiniCPM."""

    model_type: ClassVar[str] = "minicpm"
    hub_class: ClassVar[str] = "MiniCPMForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        **transformer.TransformerConfig.fixed,
        "num_experts": 0,
        "sparse_config": None,
        "mlp_bias": False,
    }

    scale_emb: float = key(
        "What embedded tokens are multiplied by.", number, 1.0, low=1e-6, high=1e6
    )
    scale_depth: float = key(
        "What branches are multiplied by, times the square root of the number of layers.",
        number,
        1.0,
        low=1e-3,
        high=1e3,
    )
    dim_model_base: float = key(
        "The head gets the normed stream times this over `hidden_size`.",
        number,
        1.0,
        low=1e-3,
        high=2**20,
    )

    @property
    def branch_scale(self) -> float:
        """The factor of each branch."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    scale = config.branch_scale
    model = transformer.build_transformer(
        replace(config, rms_norm_eps=config.rms_norm_eps / scale**2)
    )
    model.config = config
    model.embed_scale = config.scale_emb / scale
    model.hidden_scale = config.dim_model_base / config.hidden_size
    return model


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool:
    """Like `Architecture.mlx_lm`: mlx-lm knows MiniCPM with its own head and heads of usual width."""
    is_usual = config.num_attention_heads * config.head_dim == config.hidden_size
    is_known = is_usual and not config.tie_word_embeddings and not config.attention_bias
    return not is_known or transformer.needs_mlx_lm_file(config, ternary_dims)


_GGUF_KEYS = ("embedding_scale", "residual_scale", "logit_scale")


def _read_gguf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Like `GGUFFormat.read`: GGUF has the factor of a branch and the divisor of the head's input."""
    own = {key: number(given, key, low=1e-6, high=1e6) for key in _GGUF_KEYS}
    return {
        "scale_emb": own["embedding_scale"],
        "scale_depth": own["residual_scale"] * math.sqrt(integer(given, "block_count")),
        "dim_model_base": given["embedding_length"] / own["logit_scale"],
    }


def _write_gguf(config: Config) -> dict[str, Any]:
    return {
        "embedding_scale": config.scale_emb,
        "residual_scale": config.branch_scale,
        "logit_scale": config.hidden_size / config.dim_model_base,
    }


_GGUF = GGUFFormat(
    {"model_type": "minicpm"},
    rotates_pairs=True,
    own_keys=_GGUF_KEYS,
    read=_read_gguf,
    write=_write_gguf,
)

ARCHITECTURE = Architecture(
    name="minicpm",
    config=Config,
    build=build,
    weight_names=transformer.weight_names(),
    packed_formats=(*PACKED_FORMATS, "hadamard"),
    is_ternarizable=True,
    why_no_base=None,
    # the stream over its branches' scale is several times as large
    needs_range=True,
    mlx_lm=_needs_mlx_lm_file,
    gguf={"minicpm": _GGUF},
    gguf_name=lambda config: "minicpm",
    tiny={**transformer.TINY, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16.0},
    published={
        "openbmb/BitCPM-CANN-{0.5B,8B}": Published(
            "16-bit, ternary by group", "reference, definition"
        ),
        "openbmb/MiniCPM4-8B": Published("16-bit floats", "reference, definition"),
    },
)

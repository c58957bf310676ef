"""Mamba-2 (Dao and Gu, arXiv 2405.21060) as in transformers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.nn as nn

from ..errors import CheckpointError
from ..layers.dense import Linear
from ..layers.norms import RMSNorm
from ..token_mixers import Mamba2
from .parts.architecture import Architecture, draw_weights
from .parts.block import Block
from .parts.fields import (
    HubConfig,
    activation,
    boolean,
    integer,
    key,
    number,
    numbers,
    refuse_unless,
)
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(HubConfig):
    """The description of one Mamba-2."""

    model_type: ClassVar[str] = "mamba2"
    hub_class: ClassVar[str] = "Mamba2ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {"rms_norm": True, "norm_before_gate": False}

    vocab_size: int = key("Number of tokens V.", integer, 32768, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 4096, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 64, high=1024)
    num_heads: int = key("Heads.", integer, 128)
    head_dim: int = key("Dims of a value.", integer, 64)
    state_size: int = key("Dims of the state for each dim of a value.", integer, 128)
    n_groups: int = key("Groups of heads that read and write alike.", integer, 8)
    conv_kernel: int = key("Taps of the convolution.", integer, 4, high=1024)
    use_bias: bool = key("The projections have a bias.", boolean, False)
    use_conv_bias: bool = key("The convolution has a bias.", boolean, True)
    layer_norm_epsilon: float = key("Epsilon of the norms.", number, 1e-5, low=1e-12, high=1.0)
    time_step_limit: tuple[float, ...] = key(
        "The least and the largest step.",
        numbers,
        (0.0, math.inf),
        writer=list,
        count=2,
        low=0.0,
        high=math.inf,
    )
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    initializer_range: float = key(
        "Standard deviation of freshly made weights.", number, 0.1, low=0.0, high=10.0
    )

    def __post_init__(self) -> None:
        if self.num_heads % self.n_groups:
            raise CheckpointError(
                f"[config.json] 'n_groups' must divide 'num_heads', {self.num_heads}, but got "
                f"{self.n_groups}."
            )
        low, high = self.time_step_limit
        if low > high:
            raise CheckpointError(
                f"[config.json] 'time_step_limit' must hold the least step first but got {low} and "
                f"{high}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "Config":
        activation(config, "hidden_act", "silu", supported=("silu",))
        found = super().from_hub(config)
        hidden = found.num_heads * found.head_dim
        if hidden % found.hidden_size == 0:
            refuse_unless(config, {"expand": hidden // found.hidden_size})
        return found

    def to_hub(self) -> dict[str, Any]:
        expand = self.num_heads * self.head_dim / self.hidden_size
        expand = int(expand) if expand.is_integer() else expand
        # mlx-lm needs the last two, which decide nothing
        return {
            **super().to_hub(),
            "hidden_act": "silu",
            "expand": expand,
            "intermediate_size": self.num_heads * self.head_dim,
            "time_step_rank": -(-self.hidden_size // 16),
        }


def build(config: Config) -> Decoder:
    """A model with fresh weights."""
    dims, eps = config.hidden_size, config.layer_norm_epsilon
    low, high = config.time_step_limit
    embed = nn.Embedding(config.vocab_size, dims)
    blocks = []
    for _ in range(config.num_hidden_layers):
        mixer = Mamba2(
            dims,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            state_dims=config.state_size,
            num_groups=config.n_groups,
            conv_size=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            min_step=low,
            max_step=high,
            bias=config.use_bias,
            norm_eps=eps,
        )
        blocks.append(Block(dims, mixer, None, norm_eps=eps))
    head = None if config.tie_word_embeddings else Linear(dims, config.vocab_size, bias=False)
    model = Decoder(embed, blocks, RMSNorm(dims, eps=eps), head, config)
    return draw_weights(model, config.initializer_range)


def needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """mlx-lm knows the architecture, but norms all groups together."""
    return False if config.n_groups == 1 else None


def transformers_refusal(config: Config) -> str | None:
    """transformers runs every model."""
    return None


_MIXER = {
    "in_proj": "input_proj",
    "conv1d": "short_conv",
    "A_log": "decay_log",
    "D": "skip",
    "dt_bias": "step_bias",
    "norm": "output_norm",
    "out_proj": "output_proj",
}

ARCHITECTURE = Architecture(
    name="mamba2",
    config=Config,
    build=build,
    weight_names={
        "backbone.embeddings": "embed",
        "backbone.layers.{}.norm": "blocks.{}.token_norm",
        **{
            f"backbone.layers.{{}}.mixer.{theirs}": f"blocks.{{}}.token_mixer.{ours}"
            for theirs, ours in _MIXER.items()
        },
        "backbone.norm_f": "norm",
        "lm_head": "head",
    },
    mlx_lm=needs_mlx_lm_file,
    transformers=transformers_refusal,
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
)

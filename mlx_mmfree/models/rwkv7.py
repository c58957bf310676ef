"""RWKV-7 (Peng et al., arXiv 2503.14456) as in flash-linear-attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..errors import CheckpointError
from ..layers.context import Context
from ..layers.dense import Linear
from ..layers.mixer import State
from ..token_mixers import RWKV7, RWKV7Channel
from .parts.architecture import Architecture, Published, draw_weights
from .parts.block import Block
from .parts.fields import HubConfig, boolean, integer, key, number, refuse_unless, weight_std
from .parts.stack import Decoder


@dataclass(frozen=True)
class Config(HubConfig):
    """The description of one RWKV-7."""

    model_type: ClassVar[str] = "rwkv7"
    hub_class: ClassVar[str] = "RWKV7ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        "norm_first": True,
        "norm_bias": True,
        "hidden_act": "sqrelu",
        "attn": None,
        "elementwise_affine": True,
    }

    vocab_size: int = key("Number of tokens V.", integer, 32000, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 2048, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 24, high=1024)
    head_dim: int = key("Dims of a head.", integer, 64)
    intermediate_size: int = key("Width of the channel mixer; `None`: four times D.", integer, None)
    decay_low_rank_dim: int | None = key("Dims before the decay.", integer, 64, is_optional=True)
    gate_low_rank_dim: int | None = key("Dims before the gate.", integer, 128, is_optional=True)
    a_low_rank_dim: int | None = key("Dims before what is removed.", integer, 64, is_optional=True)
    v_low_rank_dim: int | None = key(
        "Dims before the share of first values.", integer, 16, is_optional=True
    )
    norm_eps: float = key("Epsilon of the norms.", number, 1e-5, low=1e-12, high=1.0)
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    max_position_embeddings: int = key(
        "The longest text of training; nothing depends on it.", integer, 2048, high=2**40
    )
    initializer_range: float = weight_std()

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    def __post_init__(self) -> None:
        self.fill("intermediate_size", 32 * -(-4 * self.hidden_size // 32))
        if self.hidden_size % self.head_dim:
            raise CheckpointError(
                f"[config.json] 'head_dim' must divide 'hidden_size', {self.hidden_size}, but got "
                f"{self.head_dim}."
            )

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        if config.get("head_dim", 64) is None:
            dims, heads = integer(config, "hidden_size", 2048), integer(config, "num_heads")
            config = {**config, "head_dim": max(dims // heads, 1)}
        found = super().from_hub(config)
        dims, blocks = found.hidden_size, found.num_hidden_layers
        given = config.get("value_dim")
        values = given if isinstance(given, list) else [given] * blocks
        if any(value not in (None, dims) for value in values) or len(values) != blocks:
            raise CheckpointError(
                f"[config.json] 'value_dim' must be {dims} as 'hidden_size' for each of the {blocks} "
                f"blocks but got {given!r:.100}."
            )
        refuse_unless(config, {"num_heads": found.num_heads})
        if config.get("intermediate_size") is None and "hidden_ratio" in config:
            ratio = number(config, "hidden_ratio", low=0.01, high=64)
            width = 32 * -(-int(dims * ratio) // 32)
            return cls(**{**cls.read_keys(config), "intermediate_size": width})
        return found

    def to_hub(self) -> dict[str, Any]:
        values = [self.hidden_size] * self.num_hidden_layers
        return {**super().to_hub(), "num_heads": self.num_heads, "value_dim": values}


class RWKV7Decoder(Decoder):
    """A `Decoder` that norms what it embeds.

    Args: as of `Decoder`, and `input_norm`, that norm.
    """

    def __init__(self, *arguments: Any, input_norm: nn.Module):
        # first, in the order of the computation
        nn.Module.__init__(self)
        self.input_norm = input_norm
        super().__init__(*arguments)

    def run(
        self,
        x: mx.array,
        state: tuple[State, ...] | None,
        context: Context,
        block_arguments: Sequence[dict[str, mx.array]] | None = None,
    ) -> tuple[mx.array, tuple[State, ...]]:
        return super().run(self.input_norm(x), state, context, block_arguments)


def build(config: Config) -> RWKV7Decoder:
    """A model with fresh weights."""
    dims, eps = config.hidden_size, config.norm_eps
    embed = nn.Embedding(config.vocab_size, dims)
    blocks = []
    for n in range(config.num_hidden_layers):
        token_mixer = RWKV7(
            dims,
            num_heads=config.num_heads,
            mixes_values=n > 0,
            decay_rank=config.decay_low_rank_dim,
            removal_rank=config.a_low_rank_dim,
            value_rank=config.v_low_rank_dim,
            gate_rank=config.gate_low_rank_dim,
            norm_eps=eps,
        )
        channel_mixer = RWKV7Channel(dims, hidden_dims=config.intermediate_size)
        blocks.append(Block(dims, token_mixer, channel_mixer, norm=nn.LayerNorm, norm_eps=eps))
    head = None if config.tie_word_embeddings else Linear(dims, config.vocab_size, bias=False)
    first, last = (nn.LayerNorm(dims, eps=eps) for _ in range(2))
    model = RWKV7Decoder(embed, blocks, last, head, config, input_norm=first)
    return draw_weights(model, config.initializer_range)


def needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """mlx-lm knows the architecture with heads of 64, for which it fixes the epsilon of their norm."""
    return False if config.head_dim == 64 and config.norm_eps == 1e-5 else None


_MIXER = {
    **{
        f"{theirs}_proj": f"{ours}_proj"
        for theirs, ours in (("r", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
    },
    **{
        f"{theirs}_lora.lora.{index}": f"{ours}_{end}"
        for theirs, ours in (("w", "decay"), ("a", "removal"), ("v", "value_mix"), ("g", "gate"))
        for index, end in ((0, "down_proj"), (2, "proj"))
    },
    "x_r": "query_shift",
    "x_w": "decay_shift",
    "x_k": "key_shift",
    "x_v": "value_shift",
    "x_a": "removal_shift",
    "x_g": "gate_shift",
    "k_k": "key_scale",
    "k_a": "removal_share",
    "r_k": "bonus",
    "g_norm": "output_norm",
}

ARCHITECTURE = Architecture(
    name="rwkv7",
    config=Config,
    build=build,
    weight_names={
        "model.embeddings": "embed",
        "model.layers.0.pre_norm": "input_norm",
        "model.layers.{}.attn_norm": "blocks.{}.token_norm",
        "model.layers.{}.ffn_norm": "blocks.{}.channel_norm",
        **{
            f"model.layers.{{}}.attn.{theirs}": f"blocks.{{}}.token_mixer.{ours}"
            for theirs, ours in _MIXER.items()
        },
        "model.layers.{}.ffn.x_k": "blocks.{}.channel_mixer.shift",
        "model.layers.{}.ffn.key": "blocks.{}.channel_mixer.key_proj",
        "model.layers.{}.ffn.value": "blocks.{}.channel_mixer.value_proj",
        "model.norm": "norm",
        "lm_head": "head",
    },
    needs_range=True,
    mlx_lm=needs_mlx_lm_file,
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "head_dim": 16,
        "decay_low_rank_dim": 4,
        "gate_low_rank_dim": 5,
        "a_low_rank_dim": 3,
        "v_low_rank_dim": 6,
    },
    published={"fla-hub/rwkv7-*": Published("16-bit", "reference")},
)

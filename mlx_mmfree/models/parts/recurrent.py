"""Recurrent models as in flash-linear-attention: their description, names and blocks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ...channel_mixers import SwiGLU
from ...channel_mixers.gated_linear_unit import default_hidden_dims
from ...errors import CheckpointError
from ...files.declared import declare
from ...layers import RoPE
from ...layers.attention.mixer import SelfAttention
from ...layers.attention.options import KeyValueCache
from ...layers.dense import Linear
from ...layers.mixer import TokenMixer
from ...layers.norms import RMSNorm
from ...token_mixers import GQA
from .architecture import draw_weights
from .block import Block
from .fields import HubConfig, activation, boolean, integer, key, number, refuse_unless, weight_std
from .stack import Decoder

TINY = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@dataclass(frozen=True)
class AttentionBlocks(HubConfig):
    """Softmax attention in place of the mixer in some blocks."""

    layers: tuple[int, ...] = declare("The numbers of the blocks, from 0.")
    num_heads: int = key("Query heads.", integer)
    num_kv_heads: int = key("Key and value heads.", integer, None)
    qkv_bias: bool = key("Queries, keys and values are projected with a bias.", boolean, False)
    window_size: int | None = key(
        "Tokens that are seen, the own one included; `None`: all before.", integer, None
    )
    rope_theta: float = key("Base of the rotation.", number, 10000.0, low=1e-6, high=1e12)

    def __post_init__(self) -> None:
        self.fill("num_kv_heads", self.num_heads)

    @classmethod
    def read(cls, given: object, dims: int, blocks: int) -> "AttentionBlocks":
        """Reads one entry of `attn`.

        Raises:
            CheckpointError: It is none, or its heads do not fit the model.
        """
        if not isinstance(given, Mapping):
            raise CheckpointError(
                f"[config.json] 'attn' must be an object, or a list of them, but got {given!r:.100}."
            )
        layers = given.get("layers")
        if not isinstance(layers, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n < blocks for n in layers
        ):
            raise CheckpointError(
                f"[config.json] 'layers' of 'attn' must be a list of numbers from 0 to {blocks - 1} but "
                f"got {layers!r:.100}."
            )
        found = cls(layers=tuple(layers), **cls.read_keys(given))
        heads, kv_heads = found.num_heads, found.num_kv_heads
        if dims % (2 * heads) or heads % kv_heads:
            raise CheckpointError(
                "[config.json] 'num_heads' of 'attn' must be a multiple of 'num_kv_heads' and cut "
                f"'hidden_size', {dims}, into heads of an even size, but got {heads} and {kv_heads}."
            )
        return found


@dataclass(frozen=True)
class RecurrentConfig(HubConfig):
    """The description of one model."""

    fixed: ClassVar[Mapping[str, Any]] = {
        "elementwise_affine": True,
        "attnres_block_size": None,
        "use_short_conv": False,
    }
    hidden_ratio: ClassVar[int] = 4
    """The rule for the width of the channel mixer where the configuration has neither."""

    vocab_size: int = key("Number of tokens V.", integer, 32000, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 2048, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 24, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, None)
    # the first models of the family have the longer name
    norm_eps: float = key(
        "Epsilon of the norms.",
        number,
        1e-6,
        names=("norm_eps", "rms_norm_eps"),
        low=1e-12,
        high=1.0,
    )
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    max_position_embeddings: int = key(
        "The longest text of training; only attention depends on it.", integer, 2048, high=2**40
    )
    initializer_range: float = weight_std()
    attn: tuple[AttentionBlocks, ...] = declare("Blocks with attention in place of the mixer.", ())

    def __post_init__(self) -> None:
        self.fill("intermediate_size", default_hidden_dims(self.hidden_size, self.hidden_ratio))

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        activation(config, "hidden_act", "swish", supported=("silu",))
        found = cls.read_keys(config)
        dims, blocks = found["hidden_size"], found["num_hidden_layers"]
        if found["intermediate_size"] is None:
            ratios = {"hidden_ratio": cls.hidden_ratio, **config}
            has_none = ratios["hidden_ratio"] is None
            ratio = 4 if has_none else number(ratios, "hidden_ratio", low=0.01, high=64)
            found["intermediate_size"] = default_hidden_dims(dims, ratio)
        return cls(**found, attn=_attention(config.get("attn"), dims, blocks))

    def attention_of(self, number: int) -> AttentionBlocks | None:
        """The attention in a block, `None` where the mixer is."""
        return next((each for each in self.attn if number in each.layers), None)

    def to_hub(self) -> dict[str, Any]:
        attention = [{**each.write_keys(), "layers": list(each.layers)} for each in self.attn]
        found = attention[0] if len(attention) == 1 else attention or None
        return {**super().to_hub(), "hidden_act": "swish", "attn": found}


@dataclass(frozen=True)
class ExpandedConfig(RecurrentConfig):
    """The description of a model whose keys and values have widths of their own."""

    fixed: ClassVar[Mapping[str, Any]] = {
        **RecurrentConfig.fixed,
        "feature_map": None,
        "use_output_gate": True,
    }

    num_heads: int = key("Heads.", integer, 4)
    expand_k: float = key("Width of all queries and keys over D.", number, 1.0, low=1e-3, high=64)
    expand_v: float = key("Width of all values over D.", number, 1.0, low=1e-3, high=64)

    @property
    def key_dims(self) -> int:
        return int(self.hidden_size * self.expand_k)

    @property
    def value_dims(self) -> int:
        return int(self.hidden_size * self.expand_v)

    def of_mixer(self) -> dict[str, Any]:
        """The arguments of a mixer."""
        return {
            "dims": self.hidden_size,
            "num_heads": self.num_heads,
            "key_dims": self.key_dims,
            "value_dims": self.value_dims,
            "norm_eps": self.norm_eps,
        }

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        found = super().from_hub(config)
        refuse_unless(config, {"num_kv_heads": found.num_heads})
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, dims in (("expand_k", self.key_dims), ("expand_v", self.value_dims)):
            if not dims or dims % self.num_heads:
                raise CheckpointError(
                    f"[config.json] 'num_heads' must divide the {dims} dims of '{name}' but got "
                    f"{self.num_heads}."
                )


@dataclass(frozen=True)
class DeltaRuleConfig(RecurrentConfig):
    """The description of a model with a gated delta rule, whose heads have a size of their own."""

    fixed: ClassVar[Mapping[str, Any]] = {**RecurrentConfig.fixed, "use_short_conv": True}

    num_heads: int = key("Heads of queries and keys.", integer, 16)
    num_v_heads: int | None = key("Heads of values; `None`: as many.", integer, None)
    head_dim: int = key("Dims of a key.", integer, 128)
    expand_v: float = key("Dims of a value over dims of a key.", number, 1.0, low=1e-3, high=64)
    conv_size: int = key("Taps of the convolutions.", integer, 4, high=1024)
    allow_neg_eigval: bool = key("Twice as much is replaced.", boolean, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_v_heads or self.num_heads) % self.num_heads:
            raise CheckpointError(
                f"[config.json] 'num_v_heads' must be a multiple of 'num_heads', {self.num_heads}, but "
                f"got {self.num_v_heads}."
            )
        if not (self.head_dim * self.expand_v).is_integer():
            raise CheckpointError(
                f"[config.json] 'expand_v' times 'head_dim', {self.head_dim}, must be a whole number "
                f"but 'expand_v' is {self.expand_v}."
            )

    def of_mixer(self) -> dict[str, Any]:
        """The arguments of a mixer."""
        return {
            "dims": self.hidden_size,
            "num_heads": self.num_heads,
            "num_value_heads": self.num_v_heads,
            "head_dim": self.head_dim,
            "value_head_dim": int(self.head_dim * self.expand_v),
            "conv_size": self.conv_size,
            "allow_negative": self.allow_neg_eigval,
            "norm_eps": self.norm_eps,
        }


def _attention(given: object, dims: int, blocks: int) -> tuple[AttentionBlocks, ...]:
    if given is None:
        return ()
    entries = given if isinstance(given, list) else [given]
    found = tuple(AttentionBlocks.read(each, dims, blocks) for each in entries)
    numbers = [number for each in found for number in each.layers]
    if len(numbers) != len(set(numbers)):
        raise CheckpointError(
            f"[config.json] 'layers' of 'attn' must name each block once but got {numbers!r:.100}."
        )
    return found


class BoundedDecoder(Decoder):
    r"""A `Decoder` whose blocks share one table of forget-gate lower bounds.

    The bound of block n is :math:`b_n = \sum_{k=1}^{n} \mathrm{softmax}(\Gamma)_k`, the softmax over
    blocks, so the first block has none. Attention has no gates, but rows in the table.

    Args: as of `Decoder`.
    """

    channel_arrays: ClassVar[tuple[str, ...]] = ("lower_bounds",)

    def add_bounds(self, gates: int) -> "BoundedDecoder":
        """Gives it a fresh table for so many gates of a block, in place, and returns it."""
        self.lower_bounds = mx.zeros((len(self.blocks), gates))
        return self

    def bounds(self) -> mx.array:
        """The bound of each block, float32 `(blocks, E)`."""
        shares = mx.softmax(self.lower_bounds.astype(mx.float32), axis=0)
        return mx.cumsum(shares, axis=0) - shares[:1]

    def block_arguments(self) -> list[dict[str, mx.array]]:
        if "lower_bounds" not in self:
            return super().block_arguments()
        bounds = self.bounds()
        return [
            {}
            if n == 0 or isinstance(block.token_mixer, SelfAttention)
            else {"lower_bound": bounds[n]}
            for n, block in enumerate(self.blocks)
        ]


Model = TypeVar("Model", bound=Decoder)

_ATTENTION = {
    "q_proj": "query_proj",
    "k_proj": "key_proj",
    "v_proj": "value_proj",
    "o_proj": "output_proj",
}


DELTA_RULE_NAMES = {
    "q_conv1d": "query_conv",
    "k_conv1d": "key_conv",
    "v_conv1d": "value_conv",
    "b_proj": "beta_proj",
    "o_norm": "output_norm",
}
"""Names within mixers that convolve queries, keys and values."""


def weight_names(mixer: Mapping[str, str]) -> dict[str, str | None]:
    """Hub names to ours, whatever the blocks with attention are.

    Args:
        mixer: Names within the mixer, without the four projections of attention.
    """
    names: dict[str, str | None] = {
        "model.embeddings": "embed",
        "model.layers.{}.attn_norm": "blocks.{}.token_norm",
        "model.layers.{}.mlp_norm": "blocks.{}.channel_norm",
        "model.layers.{}.mlp": "blocks.{}.channel_mixer",
        "model.norm": "norm",
        "lm_head": "head",
    }
    for theirs, ours in {**mixer, **_ATTENTION}.items():
        names[f"model.layers.{{}}.attn.{theirs}"] = f"blocks.{{}}.token_mixer.{ours}"
    return names


def build_recurrent(
    config: RecurrentConfig,
    mixer: Callable[[], TokenMixer],
    kind: Callable[..., Model],
) -> Model:
    """A model with fresh weights.

    Args:
        config: Its description.
        mixer: Makes the mixer of a block.
        kind: Makes the model, as `Decoder` does.
    """
    dims, eps = config.hidden_size, config.norm_eps
    embed = nn.Embedding(config.vocab_size, dims)
    blocks = []
    for n in range(config.num_hidden_layers):
        attention = config.attention_of(n)
        token_mixer = mixer() if attention is None else _attention_mixer(dims, attention)
        channel_mixer = SwiGLU(dims, hidden_dims=config.intermediate_size)
        blocks.append(Block(dims, token_mixer, channel_mixer, norm_eps=eps))
    head = None if config.tie_word_embeddings else Linear(dims, config.vocab_size, bias=False)
    model = kind(embed, blocks, RMSNorm(dims, eps=eps), head, config)
    return draw_weights(model, config.initializer_range)


def _attention_mixer(dims: int, attention: AttentionBlocks) -> GQA:
    return GQA(
        dims,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        linear={**dict.fromkeys(_ATTENTION.values(), Linear), "output_proj": _without_bias},
        bias=attention.qkv_bias,
        rope=RoPE(dims // attention.num_heads, base=attention.rope_theta),
        cache=KeyValueCache(attention.window_size),
    )


def _without_bias(input_dims: int, output_dims: int, **_: Any) -> nn.Module:
    return Linear(input_dims, output_dims, bias=False)

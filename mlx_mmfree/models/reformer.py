"""Reformer (Kitaev et al., arXiv 2001.04451) as Transformers has it: a decoder of reversible blocks.

Directions of the hash are drawn anew in each call there, and here once from a seed, so that tokens that
are read one by one fall into the buckets of those before. Beyond a chunk, a token sees others when it is
read with a prompt than when it is read alone, by nature and as there; here a prompt is read without its
last token. The bias of the head is `lm_head.decoder.bias`, or where a checkpoint of Transformers before
version 5 has none, `lm_head.bias`, which is the same there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers import FeedForward
from ..errors import CheckpointError, UnsupportedModelError
from ..layers.attention.positions import AddedPositions, AxialPositions, LearnedPositions
from ..layers.dense import Linear
from ..layers.mixer import TokenMixer
from ..token_mixers import LocalAttention
from ..token_mixers import Reformer as HashedAttention
from .parts.architecture import Architecture, OlderName, Published, draw_weights
from .parts.fields import (
    ACTIVATIONS,
    HubConfig,
    activation,
    boolean,
    integer,
    key,
    number,
    refuse_unless,
    weight_std,
)
from .parts.reversible import ReversibleBlock
from .parts.stack import Decoder

_SUPPORTED = {
    "is_decoder": True,
    "tie_word_embeddings": False,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
}


def _kinds(config: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    kinds = config.get(key, list(default))
    if (
        not isinstance(kinds, list)
        or not 0 < len(kinds) <= 1024
        or set(map(str, kinds)) - {"local", "lsh"}
    ):
        raise CheckpointError(
            f"[config.json] '{key}' must be a list of 'local' and 'lsh', one for each layer, but got "
            f"{kinds!r:.100}."
        )
    return tuple(kinds)


def _pair(config: Mapping[str, Any], key: str, default: tuple[int, int]) -> tuple[int, int]:
    value = config.get(key, list(default))
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(
            f"[config.json] '{key}' must be a list of two numbers but got {value!r:.100}."
        )
    first, second = (integer({key: each}, key) for each in value)
    return first, second


def _factors(config: Mapping[str, Any], key: str, default: object) -> tuple[int, ...]:
    value = config[key]
    if "lsh" not in config["attn_layers"]:
        return ()
    factors = value if isinstance(value, list) else [value]
    found = tuple(integer({key: each}, key) for each in factors)
    if not 0 < len(found) <= 8 or any(each % 2 for each in found):
        raise CheckpointError(
            f"[config.json] '{key}' must be even, or a list of even factors, but got {value!r:.100}."
        )
    return found


@dataclass(frozen=True)
class ReformerConfig(HubConfig):
    """The description of one Reformer."""

    model_type: ClassVar[str] = "reformer"
    hub_class: ClassVar[str] = "ReformerModelWithLMHead"
    fixed: ClassVar[Mapping[str, Any]] = _SUPPORTED

    vocab_size: int = key("Number of tokens V.", integer, 320, high=2**24)
    hidden_size: int = key("Dims D of each of the two streams.", integer, 256, high=2**17)
    attn_layers: tuple[str, ...] = key(
        "The kind of each block, `local` or `lsh`.", _kinds, ("local", "lsh") * 3, writer=list
    )
    num_attention_heads: int = key("Heads.", integer, 12)
    attention_head_size: int = key("Dims of a head.", integer, 64, high=2**12)
    feed_forward_size: int = key("Width of the channel mixer.", integer, 512)
    hidden_act: str = key(
        "Its activation.", activation, "relu", supported=("relu", "gelu", "gelu_tanh", "silu")
    )
    axial_pos_shape: tuple[int, int] | None = key(
        "Lines and columns of the table of positions; `None`: each has a row.",
        _pair,
        (64, 64),
        writer=list,
    )
    axial_pos_embds_dim: tuple[int, int] | None = key(
        "Dims of a line and a column.", _pair, (64, 192), writer=list
    )
    max_position_embeddings: int = key(
        "Rows, where each position has one.", integer, 4096, high=2**24
    )
    local_attn_chunk_length: int = key("Tokens of a block of local attention.", integer, 64)
    lsh_attn_chunk_length: int = key("Tokens of a chunk of hashed attention.", integer, 64)
    num_hashes: int = key("Rounds of hashing.", integer, 1, high=1024)
    num_buckets: tuple[int, ...] = key(
        "Factors of the number of buckets; none if no layer hashes. Where the file has none, "
        "Transformers takes what follows from the first text of a process; here it follows from the "
        "longest text, as there in training, whose texts fill `axial_pos_shape`.",
        _factors,
        None,
        writer=list,
    )
    hash_seed: int | None = key(
        "Seed of the directions in each layer; `None`: every layer has its own.",
        integer,
        None,
        low=0,
        high=2**63 - 1,
    )
    layer_norm_eps: float = key("Epsilon of the norms.", number, 1e-12, low=1e-15, high=1.0)
    initializer_range: float = weight_std()

    def __post_init__(self) -> None:
        dims = self.axial_pos_embds_dim
        if dims is not None and sum(dims) != self.hidden_size:
            raise CheckpointError(
                f"[config.json] 'axial_pos_embds_dim' must add up to 'hidden_size', {self.hidden_size}, "
                f"but got {list(dims)}."
            )
        has_both = len(set(self.attn_layers)) > 1
        if has_both and self.lsh_attn_chunk_length % self.local_attn_chunk_length:
            raise UnsupportedModelError(
                "[config.json] 'lsh_attn_chunk_length' must be a multiple of 'local_attn_chunk_length', "
                f"{self.local_attn_chunk_length}, but got {self.lsh_attn_chunk_length}: chunks would "
                "begin elsewhere."
            )
        if "lsh" not in self.attn_layers:
            object.__setattr__(self, "num_buckets", ())
        self.fill("num_buckets", self._buckets_of_longest())

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        refuse_unless(config, cls.fixed)
        if config.get("is_decoder") is None:
            raise UnsupportedModelError(
                "[config.json] 'is_decoder' must be true but is missing, which means an encoder."
            )
        if not boolean(config, "axial_pos_embds", True):
            config = {**config, "axial_pos_shape": [1, 1], "axial_pos_embds_dim": [1, 1]}
        found = cls.read_keys(config)
        if not boolean(config, "axial_pos_embds", True):
            found |= {"axial_pos_shape": None, "axial_pos_embds_dim": None}
        return cls(**found)

    def to_hub(self) -> dict[str, Any]:
        config = super().to_hub()
        is_axial = self.axial_pos_shape is not None
        if not is_axial:
            del config["axial_pos_shape"], config["axial_pos_embds_dim"]
        layers = {"axial_pos_embds": is_axial, "num_hidden_layers": len(self.attn_layers)}
        return {**config, **_SUPPORTED, **layers}

    def _buckets_of_longest(self) -> tuple[int, ...]:
        """The factors that Transformers sets when the first text is the longest that has positions."""
        chunk, rows = self.lsh_attn_chunk_length, self.max_position_embeddings
        longest = rows if self.axial_pos_shape is None else math.prod(self.axial_pos_shape)
        # texts of less than a chunk are not hashed there
        power = max(1, (2 * (longest // chunk)).bit_length() - 1)
        if 2**power <= 2 * max(math.isqrt(rows // chunk), chunk):
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)


_LAYER: dict[str, str | None] = {
    "attention.layer_norm": "token_norm",
    "attention.self_attention.query_key": "token_mixer.query_key_proj",
    "attention.self_attention.query": "token_mixer.query_proj",
    "attention.self_attention.key": "token_mixer.key_proj",
    "attention.self_attention.value": "token_mixer.value_proj",
    "attention.output.dense": "token_mixer.output_proj",
    "feed_forward.layer_norm": "channel_norm",
    "feed_forward.dense.dense": "channel_mixer.up_proj",
    "feed_forward.output.dense": "channel_mixer.down_proj",
    # constants that older versions stored
    "attention.self_attention.self_mask_value_float16": None,
    "attention.self_attention.self_mask_value_float32": None,
    "attention.self_attention.mask_value_float16": None,
    "attention.self_attention.mask_value_float32": None,
}

WEIGHT_NAMES: dict[str, str | None] = {
    **{
        f"reformer.encoder.layers.{{}}.{theirs}": None if ours is None else f"blocks.{{}}.{ours}"
        for theirs, ours in _LAYER.items()
    },
    "reformer.embeddings.word_embeddings": "embed",
    "reformer.embeddings.position_embeddings.weights.0": "positions.code.lines",
    "reformer.embeddings.position_embeddings.weights.1": "positions.code.columns",
    "reformer.embeddings.position_embeddings.embedding": "positions.code.rows",
    "reformer.encoder.layer_norm": "norm",
    "lm_head.decoder": "head",
    "lm_head.bias": OlderName("head.bias"),
}


class Reformer(Decoder):
    """A `Decoder` of reversible blocks, whose two streams begin alike and are normed side by side."""

    def merged(self, x: mx.array) -> mx.array:
        return x


def build(config: ReformerConfig) -> Reformer:
    """A model with fresh weights."""
    dims, eps = config.hidden_size, config.layer_norm_eps
    blocks = [
        ReversibleBlock(
            dims,
            _mixer(config, number),
            FeedForward(
                dims,
                hidden_dims=config.feed_forward_size,
                activation=ACTIVATIONS[config.hidden_act],  # type: ignore[arg-type]
            ),
            norm_eps=eps,
        )
        for number in range(len(config.attn_layers))
    ]
    code: nn.Module
    if config.axial_pos_shape is not None and config.axial_pos_embds_dim is not None:
        code = AxialPositions(config.axial_pos_shape, config.axial_pos_embds_dim)
    else:
        code = LearnedPositions(dims, max_length=config.max_position_embeddings)
    model = Reformer(
        nn.Embedding(config.vocab_size, dims),
        blocks,
        nn.LayerNorm(2 * dims, eps=eps),
        Linear(2 * dims, config.vocab_size),
        config,
        AddedPositions(dims, code),
    )
    return draw_weights(model, config.initializer_range)


def _mixer(config: ReformerConfig, number: int) -> TokenMixer:
    heads, head_dim = config.num_attention_heads, config.attention_head_size
    if config.attn_layers[number] == "local":
        return LocalAttention(
            config.hidden_size,
            block_size=config.local_attn_chunk_length,
            num_heads=heads,
            head_dim=head_dim,
        )
    return HashedAttention(
        config.hidden_size,
        chunk_size=config.lsh_attn_chunk_length,
        num_rounds=config.num_hashes,
        num_buckets=config.num_buckets,
        convention="transformers",
        seed=number if config.hash_seed is None else config.hash_seed,
        num_heads=heads,
        head_dim=head_dim,
    )


ARCHITECTURE = Architecture(
    name="reformer",
    config=ReformerConfig,
    build=build,
    weight_names=WEIGHT_NAMES,
    tiny={
        "vocab_size": 60,
        "hidden_size": 32,
        "attn_layers": ["local", "lsh"],
        "num_attention_heads": 2,
        "attention_head_size": 16,
        "feed_forward_size": 48,
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [8, 24],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 4,
        "num_buckets": [2, 4],
        "is_decoder": True,
    },
    published={"google/reformer-{crime-and-punishment,enwik8}": Published("float32", "reference")},
)

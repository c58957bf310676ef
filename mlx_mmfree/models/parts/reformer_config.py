"""The configuration of a Reformer, as Transformers writes it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .fields import activation, boolean, integer, number, refuse_unless

_SUPPORTED = {
    "is_decoder": True,
    "tie_word_embeddings": False,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
}


@dataclass(frozen=True)
class ReformerConfig:
    """The description of one Reformer.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Dims D of each of the two streams.
        attn_layers: The kind of each block, `local` or `lsh`.
        num_attention_heads: Heads.
        attention_head_size: Dims of a head.
        feed_forward_size: Width of the channel mixer.
        hidden_act: Its activation.
        axial_pos_shape: Lines and columns of the table of positions; `None`: each has a row.
        axial_pos_embds_dim: Dims of a line and a column.
        max_position_embeddings: Rows, where each position has one.
        local_attn_chunk_length: Tokens of a block of local attention.
        lsh_attn_chunk_length: Tokens of a chunk of hashed attention.
        num_hashes: Rounds of hashing.
        num_buckets: Factors of the number of buckets; none if no layer hashes. Where the file has none,
            Transformers takes what follows from the first text of a process; here it follows from the
            longest text, as there in training, whose texts fill `axial_pos_shape`.
        hash_seed: Seed of the directions in each layer; `None`: every layer has its own.
        layer_norm_eps: Epsilon of the norms.
        initializer_range: Standard deviation of freshly made weights.
    """

    vocab_size: int
    hidden_size: int
    attn_layers: tuple[str, ...]
    num_attention_heads: int = 12
    attention_head_size: int = 64
    feed_forward_size: int = 512
    hidden_act: str = "relu"
    axial_pos_shape: tuple[int, int] | None = (64, 64)
    axial_pos_embds_dim: tuple[int, int] | None = (64, 192)
    max_position_embeddings: int = 4096
    local_attn_chunk_length: int = 64
    lsh_attn_chunk_length: int = 64
    num_hashes: int = 1
    num_buckets: tuple[int, ...] = ()
    hash_seed: int | None = None
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02

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

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "ReformerConfig":
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        refuse_unless(config, _SUPPORTED)
        if config.get("is_decoder") is None:
            raise UnsupportedModelError(
                "[config.json] 'is_decoder' must be true but is missing, which means an encoder."
            )
        is_axial = boolean(config, "axial_pos_embds", True)
        seed = config.get("hash_seed")
        return cls(
            vocab_size=integer(config, "vocab_size", 320, high=2**24),
            hidden_size=integer(config, "hidden_size", 256, high=2**17),
            attn_layers=_kinds(config),
            num_attention_heads=integer(config, "num_attention_heads", 12),
            attention_head_size=integer(config, "attention_head_size", 64, high=2**12),
            feed_forward_size=integer(config, "feed_forward_size", 512),
            hidden_act=activation(
                config, "hidden_act", ("relu", "gelu", "gelu_tanh", "silu"), "relu"
            ),
            axial_pos_shape=_pair(config, "axial_pos_shape", (64, 64)) if is_axial else None,
            axial_pos_embds_dim=_pair(config, "axial_pos_embds_dim", (64, 192))
            if is_axial
            else None,
            max_position_embeddings=integer(config, "max_position_embeddings", 4096, high=2**24),
            local_attn_chunk_length=integer(config, "local_attn_chunk_length", 64),
            lsh_attn_chunk_length=integer(config, "lsh_attn_chunk_length", 64),
            num_hashes=integer(config, "num_hashes", 1, high=1024),
            num_buckets=_buckets(config),
            hash_seed=None if seed is None else integer(config, "hash_seed", low=0, high=2**63 - 1),
            layer_norm_eps=number(config, "layer_norm_eps", 1e-12, low=1e-15, high=1.0),
            initializer_range=number(config, "initializer_range", 0.02, low=0.0, high=10.0),
        )

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this architecture, read back by `from_hub`."""
        config = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }
        is_axial = self.axial_pos_shape is not None
        if not is_axial:
            del config["axial_pos_shape"], config["axial_pos_embds_dim"]
        return {
            "model_type": "reformer",
            "architectures": ["ReformerModelWithLMHead"],
            **_SUPPORTED,
            "axial_pos_embds": is_axial,
            "num_hidden_layers": len(self.attn_layers),
            **config,
        }


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = config.get("attn_layers", ["local", "lsh"] * 3)
    if (
        not isinstance(kinds, list)
        or not 0 < len(kinds) <= 1024
        or set(map(str, kinds)) - {"local", "lsh"}
    ):
        raise CheckpointError(
            "[config.json] 'attn_layers' must be a list of 'local' and 'lsh', one for each layer, but "
            f"got {kinds!r:.100}."
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


def _buckets(config: Mapping[str, Any]) -> tuple[int, ...]:
    if "lsh" not in _kinds(config):
        return ()
    value = config.get("num_buckets")
    if value is None:
        return _buckets_of_longest(config)
    factors = value if isinstance(value, list) else [value]
    found = tuple(integer({"num_buckets": each}, "num_buckets") for each in factors)
    if not 0 < len(found) <= 8 or any(each % 2 for each in found):
        raise CheckpointError(
            "[config.json] 'num_buckets' must be even, or a list of even factors, but got "
            f"{value!r:.100}."
        )
    return found


def _buckets_of_longest(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The factors that Transformers sets when the first text is the longest that has positions."""
    chunk = integer(config, "lsh_attn_chunk_length", 64)
    rows = longest = integer(config, "max_position_embeddings", 4096, high=2**24)
    if boolean(config, "axial_pos_embds", True):
        lines, columns = _pair(config, "axial_pos_shape", (64, 64))
        longest = lines * columns
    # texts of less than a chunk are not hashed there
    power = max(1, (2 * (longest // chunk)).bit_length() - 1)
    if 2**power <= 2 * max(math.isqrt(rows // chunk), chunk):
        return (2**power,)
    return 2 ** (power // 2), 2 ** (power - power // 2)

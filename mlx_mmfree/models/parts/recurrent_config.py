"""Configurations of flash-linear-attention: a recurrent mixer, or in some blocks attention."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from ...channel_mixers.gated_linear_unit import default_hidden_dims
from ...errors import CheckpointError
from .fields import activation, agreed, boolean, integer, number, refuse_unless

_SAME_MATHEMATICS: Mapping[str, Any] = {
    "elementwise_affine": True,
    "attnres_block_size": None,
    "use_short_conv": False,
}
"""What changes the mathematics of every model of the family, with the values that are implemented."""


@dataclass(frozen=True)
class AttentionBlocks:
    """Softmax attention in place of the mixer in some blocks.

    Attributes:
        layers: The numbers of the blocks, from 0.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        qkv_bias: Queries, keys and values are projected with a bias.
        window_size: Tokens that are seen, the own one included; `None`: all before.
        rope_theta: Base of the rotation.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    qkv_bias: bool = False
    window_size: int | None = None
    rope_theta: float = 10000.0

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
        heads = integer(given, "num_heads")
        has_own_keys = given.get("num_kv_heads") is not None
        kv_heads = integer(given, "num_kv_heads") if has_own_keys else heads
        if dims % (2 * heads) or heads % kv_heads:
            raise CheckpointError(
                "[config.json] 'num_heads' of 'attn' must be a multiple of 'num_kv_heads' and cut "
                f"'hidden_size', {dims}, into heads of an even size, but got {heads} and {kv_heads}."
            )
        has_window = given.get("window_size") is not None
        return cls(
            tuple(layers),
            heads,
            kv_heads,
            boolean(given, "qkv_bias", False),
            integer(given, "window_size") if has_window else None,
            number(given, "rope_theta", 10000.0, low=1e-6, high=1e12),
        )


@dataclass(frozen=True)
class RecurrentConfig:
    """The description of one model.

    Attributes:
        vocab_size: Number of tokens V.
        hidden_size: Model dims D.
        num_hidden_layers: Number of blocks.
        intermediate_size: Width of the channel mixer.
        norm_eps: Epsilon of the norms.
        tie_word_embeddings: The head reads the embedding's weight.
        max_position_embeddings: The longest text of training; only attention depends on it.
        initializer_range: Standard deviation of freshly made weights.
        attn: Blocks with attention in place of the mixer.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    hidden_ratio: ClassVar[int] = 4
    """What makes the width of the channel mixer where the configuration has neither."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    attn: tuple[AttentionBlocks, ...] = ()

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        """Reads the keys of a Hub `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for mathematics that are not implemented.
        """
        refuse_unless(config, _SAME_MATHEMATICS)
        activation(config, "hidden_act", ("silu",), "swish")
        return cls(**cls.shared_fields(config), **cls.mixer_fields(config))

    @classmethod
    def mixer_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this mixer."""
        raise NotImplementedError

    @classmethod
    def shared_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that all models of the family have."""
        dims = integer(config, "hidden_size", 2048, high=2**17)
        blocks = integer(config, "num_hidden_layers", 24, high=1024)
        if config.get("intermediate_size") is not None:
            hidden_dims = integer(config, "intermediate_size")
        else:
            ratios = {"hidden_ratio": cls.hidden_ratio, **config}
            has_none = ratios["hidden_ratio"] is None
            ratio = 4 if has_none else number(ratios, "hidden_ratio", low=0.01, high=64)
            hidden_dims = default_hidden_dims(dims, ratio)
        # the first models of the family have the longer name
        keys = ("norm_eps", "rms_norm_eps")
        eps = agreed({f"'{key}'": config.get(key) for key in keys})
        return {
            "vocab_size": integer(config, "vocab_size", 32000, high=2**24),
            "hidden_size": dims,
            "num_hidden_layers": blocks,
            "intermediate_size": hidden_dims,
            "norm_eps": 1e-6
            if eps is None
            else number({"norm_eps": eps}, "norm_eps", low=1e-12, high=1.0),
            "tie_word_embeddings": boolean(config, "tie_word_embeddings", False),
            "max_position_embeddings": integer(config, "max_position_embeddings", 2048, high=2**40),
            "initializer_range": number(config, "initializer_range", 0.02, low=0.0, high=10.0),
            "attn": _attention(config.get("attn"), dims, blocks),
        }

    def attention_of(self, number: int) -> AttentionBlocks | None:
        """The attention in a block, `None` where the mixer is."""
        return next((each for each in self.attn if number in each.layers), None)

    def to_hub(self) -> dict[str, Any]:
        """The `config.json` of this model, read back by `from_hub`."""
        attention = [{**asdict(each), "layers": list(each.layers)} for each in self.attn]
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "hidden_act": "swish",
            **asdict(self),
            "attn": attention[0] if len(attention) == 1 else attention or None,
        }


@dataclass(frozen=True)
class ExpandedConfig(RecurrentConfig):
    """The description of a model whose keys and values have widths of their own.

    Attributes: as `RecurrentConfig`, and
        num_heads: Heads.
        expand_k: Width of all queries and keys over D.
        expand_v: Width of all values over D.
    """

    num_heads: int = 4
    expand_k: float = 1.0
    expand_v: float = 1.0

    @property
    def key_dims(self) -> int:
        return int(self.hidden_size * self.expand_k)

    @property
    def value_dims(self) -> int:
        return int(self.hidden_size * self.expand_v)

    def __post_init__(self) -> None:
        for key, dims in (("expand_k", self.key_dims), ("expand_v", self.value_dims)):
            if not dims or dims % self.num_heads:
                raise CheckpointError(
                    f"[config.json] 'num_heads' must divide the {dims} dims of '{key}' but got "
                    f"{self.num_heads}."
                )

    @classmethod
    def mixer_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        heads = integer(config, "num_heads", cls.num_heads)
        refuse_unless(config, {"num_kv_heads": heads, "feature_map": None, "use_output_gate": True})
        return {
            "num_heads": heads,
            "expand_k": number(config, "expand_k", cls.expand_k, low=1e-3, high=64),
            "expand_v": number(config, "expand_v", cls.expand_v, low=1e-3, high=64),
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

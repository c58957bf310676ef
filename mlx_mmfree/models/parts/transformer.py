"""The family of transformers around Llama: their description, their names on the Hub and their blocks.

A file of `models` says what sets one architecture of the family apart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import mlx.nn as nn

from ...channel_mixers import SwiGLU
from ...channel_mixers.gated_linear_unit import GatedLinearUnit
from ...errors import CheckpointError, UnsupportedModelError
from ...files.declared import declare
from ...layers.norms import RMSNorm
from ...token_mixers import GQA, AttentionNorms
from .architecture import architectures, bases, draw_weights, find
from .block import Block, NormOrder
from .embedder import TextEmbedder
from .fields import HubConfig, activation, boolean, integer, key, number, section, weight_std
from .mixers import MixerChoice, MixerPositions, read_choices
from .rotation import Rotation
from .stack import Decoder
from .ternary_linears import TernaryLinears, linear_of

# Keys of this and kindred architectures that change the mathematics, with the value that is meant.
_FIXED = {
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "partial_rotary_factor": 1.0,
    "quant_bits": 0,
    "rope_interleaved": False,
    "rotary_pct": 1.0,
    "use_parallel_residual": False,
    "weight_bits": 1,
    "input_bits": 8,
}


@dataclass(frozen=True)
class TransformerConfig(HubConfig):
    """The description of one model of the family.

    What transformers takes for absent keys are the defaults of its Llama.
    """

    fixed: ClassVar[Mapping[str, Any]] = _FIXED
    default_theta: ClassVar[float | None] = 10000.0
    sub_norm_class: ClassVar[str | None] = None
    """The name in `architectures` of those models that have norms before the last projections."""
    embedder_class: ClassVar[str | None] = None
    """That of a model without a head, which embeds texts."""

    vocab_size: int = key("Number of tokens V.", integer, 32000, high=2**24)
    hidden_size: int = key("Model dims D.", integer, 4096, high=2**17)
    num_hidden_layers: int = key("Number of blocks.", integer, 32, high=1024)
    intermediate_size: int = key("Width of the channel mixer.", integer, 11008)
    num_attention_heads: int = key("Query heads.", integer, 32, high=2**12)
    num_key_value_heads: int = key("Key and value heads.", integer, None, high=2**12)
    head_dim: int = key("Dims of a head.", integer, None, high=2**12)
    rms_norm_eps: float = key(
        "Epsilon of all norms but those inside linears.", number, 1e-6, low=1e-12, high=1.0
    )
    rotation: Rotation = declare("Rotary positions.", Rotation())
    linears: TernaryLinears | None = declare(
        "What ternary linears compute; `None`: all are dense.", None
    )
    has_sub_norms: bool = declare(
        "A norm before the last projection of attention and feed-forward.", False
    )
    hidden_act: str = key(
        "Activation of the feed-forward's gate.",
        activation,
        "silu",
        supported=("silu",),
        as_meant=True,
    )
    attention_bias: bool = key("Whether the projections of attention have a bias.", boolean, False)
    mlp_bias: bool = key("Whether linears of the feed-forward have one.", boolean, False)
    tie_word_embeddings: bool = key("The head reads the embedding's weight.", boolean, False)
    max_position_embeddings: int = key(
        "The longest text of training, where dynamic scaling begins.", integer, 2048, high=2**40
    )
    is_embedder: bool = declare("Whether the model embeds texts in place of writing them.", False)
    initializer_range: float = weight_std()

    def __post_init__(self) -> None:
        dims, heads = self.hidden_size, self.num_attention_heads
        self.fill("num_key_value_heads", heads)
        if not self.head_dim and dims % heads:
            raise CheckpointError(
                "[config.json] 'num_attention_heads' must divide 'hidden_size' unless 'head_dim' is "
                f"given but got {heads} for {dims}."
            )
        self.fill("head_dim", dims // heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                "[config.json] 'num_key_value_heads' must divide 'num_attention_heads' but got "
                f"{self.num_key_value_heads} for {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise CheckpointError(
                f"[config.json] 'head_dim' must be even, for rotary positions, but got {self.head_dim}."
            )
        if self.rotation.factors and len(self.rotation.factors) != self.rotary_dims // 2:
            raise CheckpointError(
                f"[config.json] 'short_factor' must hold {self.rotary_dims // 2} numbers, one for each "
                f"rotated pair of a head's dims, but has {len(self.rotation.factors)}."
            )
        if self.rotation.scaling == "yarn" and self.rotation.theta <= 1:
            raise CheckpointError(
                f"[config.json] 'rope_theta' must be more than 1 for yarn but got "
                f"{self.rotation.theta}."
            )
        if self.rotation.scaling == "dynamic" and self.rotary_dims < 4:
            raise CheckpointError(
                "[config.json] 'rope_type' must not be dynamic unless at least 4 dims of a head are "
                f"rotated but {self.rotary_dims} are."
            )

    @property
    def rotary_dims(self) -> int:
        """The first dims of a head, which are rotated: all of them unless an architecture differs."""
        return self.head_dim

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        # of layers that see a window mlx-lm's Llama takes notice
        kinds = config.get("layer_types")
        if kinds is not None and (
            not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
        ):
            raise UnsupportedModelError(
                f"[config.json] 'layer_types' must be full_attention for all layers but got "
                f"{kinds!r:.100}. Other layers are not implemented."
            )
        described = section(config, "quantization_config")
        if config.get("quantization") is not None and "quant_method" not in described:
            # MLX's copy of `quantization`, which says how weights are stored, not what linears compute
            config = {key: config[key] for key in config if key != "quantization_config"}
        found = cls.read_keys(config)
        given = config.get("architectures")
        named = [name for name in given if name] if isinstance(given, list) else []
        has_sub_norms = cls.has_sub_norms or cls.sub_norm_class in named
        linears = TernaryLinears.from_hub(config) or (TernaryLinears() if has_sub_norms else None)
        if linears is None and config.get("weight_bits") is not None:
            also = f" or with the architecture {cls.sub_norm_class}" if cls.sub_norm_class else ""
            raise UnsupportedModelError(
                f"[config.json] 'weight_bits' must come with 'quantization_config'{also}, to say what "
                "is ternary, but came alone."
            )
        length = {"max_position_embeddings": found["max_position_embeddings"]}
        rotation = Rotation.from_hub({**length, **config}, cls.default_theta)
        return cls(
            **found,
            rotation=rotation,
            linears=linears,
            has_sub_norms=has_sub_norms,
            is_embedder=cls.embedder_class in named,
        )

    def to_hub(self) -> dict[str, Any]:
        config = {**super().to_hub(), **self.rotation.to_hub()}
        if self.has_sub_norms and self.sub_norm_class:
            config["architectures"] = [self.sub_norm_class]
        if self.is_embedder:
            config["architectures"] = [self.embedder_class]
        if self.linears is not None:
            config["quantization_config"] = self.linears.to_hub()
        return config

    def with_dense(self, names: Iterable[str]) -> Self:
        """The same with these ternary linears dense, by their Hub names."""
        linears = None if self.linears is None else self.linears.without(names)
        return replace(self, linears=linears)


LINEARS = {
    "self_attn.q_proj": "token_mixer.query_proj",
    "self_attn.k_proj": "token_mixer.key_proj",
    "self_attn.v_proj": "token_mixer.value_proj",
    "self_attn.o_proj": "token_mixer.output_proj",
    "mlp.gate_proj": "channel_mixer.gate_proj",
    "mlp.up_proj": "channel_mixer.up_proj",
    "mlp.down_proj": "channel_mixer.down_proj",
}
"""Linears of a block, Hub name to ours."""


def weight_names(sub_norms: tuple[str, str] | None = None) -> dict[str, str | None]:
    """Hub names to ours.

    Args:
        sub_norms: What the Hub calls the norms before the last projection of attention and of the
            feed-forward, where there are some.
    """
    names: dict[str, str | None] = {
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm.weight": "blocks.{}.token_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.channel_norm.weight",
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,
        "model.norm.weight": "norm.weight",
        "lm_head": "head",
        "lm_head.rms_norm": "head.norm",
    }
    if sub_norms is not None:
        attention, feed_forward = sub_norms
        names |= {
            f"model.layers.{{}}.{attention}.weight": "blocks.{}.token_mixer.output_norm.weight",
            f"model.layers.{{}}.{feed_forward}.weight": "blocks.{}.channel_mixer.hidden_norm.weight",
        }
    for hub, ours in LINEARS.items():
        names[f"model.layers.{{}}.{hub}"] = f"blocks.{{}}.{ours}"
        names[f"model.layers.{{}}.{hub}.rms_norm"] = f"blocks.{{}}.{ours}.norm"
    return names


def build_transformer(
    config: TransformerConfig,
    *,
    gated: type[GatedLinearUnit] = SwiGLU,
    qk_norm_eps: float | None = None,
    norm: Callable[..., nn.Module] = RMSNorm,
    norm_order: NormOrder = "pre",
    attention: Sequence[Mapping[str, Any]] = (),
) -> Decoder:
    """A model of this family with fresh weights, in its training variant.

    Args:
        config: Its architecture.
        gated: The feed-forward.
        qk_norm_eps: As `AttentionNorms.qk_eps`.
        norm: Makes the norms of the blocks and the last one, called as `norm(dims, eps=...)`.
        norm_order: As of `Block`.
        attention: For each layer, arguments of its attention where they are not as in the others.
    """
    dims, eps = config.hidden_size, config.rms_norm_eps
    embed = nn.Embedding(config.vocab_size, dims)
    sub_norm_eps = eps if config.has_sub_norms else None
    blocks = []
    rope = config.rotation.build(config.rotary_dims)
    own = attention or [{"rope": rope}] * config.num_hidden_layers
    for layer, arguments in enumerate(own):
        linears = {
            ours.split(".")[1]: linear_of(config.linears, f"model.layers.{layer}.{hub}")
            for hub, ours in LINEARS.items()
        }
        mixer = GQA(
            dims,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            linear=linears,
            bias=config.attention_bias,
            norms=AttentionNorms(qk_norm_eps, sub_norm_eps),
            **arguments,
        )
        feed_forward = gated(
            dims,
            hidden_dims=config.intermediate_size,
            linear=linears,
            bias=config.mlp_bias,
            norm_eps=sub_norm_eps,
        )
        blocks.append(
            Block(dims, mixer, feed_forward, norm=norm, norm_eps=eps, norm_order=norm_order)
        )
    head = None
    if not config.tie_word_embeddings and not config.is_embedder:
        head = linear_of(config.linears, "lm_head")(dims, config.vocab_size, bias=False)
    kind = TextEmbedder if config.is_embedder else Decoder
    model = kind(embed, blocks, norm(dims, eps=eps), head, config)
    return draw_weights(model, config.initializer_range)


def needs_mlx_lm_file(config: TransformerConfig, ternary_dims: Sequence[int]) -> bool:
    """Like `Architecture.mlx_lm`, where mlx-lm has an architecture of the same name.

    It knows ternary linears in sizes of whole groups.
    """
    if not ternary_dims:
        return False
    is_plain = config.linears is not None and config.linears.norm_eps is None
    return not is_plain or any(dims % 32 for dims in ternary_dims)


TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


ATTENTION = "attention"
"""Names the attention of the base, which stays as it is."""


@dataclass(frozen=True)
class HybridConfig:
    """The description of one hybrid.

    A `config.json` has the keys of the base, whose `model_type` and `architectures` stand under
    `base_model_type` and `base_architectures`, and `token_mixer`: a mixer as in a `metaformer`, or a
    list of them, which repeats from layer to layer.

    Attributes:
        base: The transformer.
        token_mixers: For each layer its mixer, or "attention" for the base's own.
    """

    base: TransformerConfig
    token_mixers: tuple[MixerChoice, ...]

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> "HybridConfig":
        """Reads the keys of a `config.json`.

        Raises:
            CheckpointError: A value is missing, of the wrong type or out of bounds.
            UnsupportedModelError: A key asks for what is not implemented.
        """
        name = config.get("base_model_type")
        if name not in bases():
            is_known = isinstance(name, str) and name in architectures()
            why = f": {find(name).why_no_base}" if is_known else ""
            raise UnsupportedModelError(
                f"[config.json] 'base_model_type' must be one of {', '.join(bases())} but got "
                f"{name!r:.100}{why}."
            )
        if "token_mixer" not in config:
            raise CheckpointError("[config.json] 'token_mixer' must be given but is missing.")
        of_base = {"model_type": name, "architectures": config.get("base_architectures")}
        base = find(name).config.from_hub({**config, **of_base})
        return cls.of(base, read_choices("token_mixer", config["token_mixer"]))

    @classmethod
    def of(cls, base: TransformerConfig, token_mixers: tuple[MixerChoice, ...]) -> "HybridConfig":
        """A description with mixers that repeat from layer to layer.

        Raises:
            CheckpointError: There are more mixers than layers.
        """
        layers = base.num_hidden_layers
        if len(token_mixers) > layers:
            raise CheckpointError(
                f"[config.json] 'token_mixer' must name at most one mixer for each of the {layers} "
                f"layers but names {len(token_mixers)}."
            )
        count = len(token_mixers)
        return cls(base, tuple(token_mixers[n % count] for n in range(layers)))

    def to_hub(self) -> dict[str, Any]:
        """The `config.json`, read back by `from_hub`."""
        base = self.base.to_hub()
        # transformers, which mlx-lm takes tokenizers from, fails at `rope_scaling` of an unknown model
        theta, scaling = base.pop("rope_theta"), base.pop("rope_scaling") or {}
        return {
            **base,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling},
            "model_type": "hybrid",
            "architectures": ["HybridForCausalLM"],
            "base_model_type": base["model_type"],
            "base_architectures": base["architectures"],
            "token_mixer": [choice.plain() for choice in self.token_mixers],
        }

    def with_dense(self, names: Iterable[str]) -> "HybridConfig":
        """The same with these ternary linears dense, by their Hub names.

        Those of the base's attention are kept by the names that they have in the base.
        """
        of_base: dict[str, str] = {}
        for n, choice in enumerate(self.token_mixers):
            if choice.name == ATTENTION:
                layer = f"model.layers.{n}"
                of_base |= {f"{layer}.{ours}": f"{layer}.{hub}" for hub, ours in LINEARS.items()}
        return replace(self, base=self.base.with_dense(of_base.get(name, name) for name in names))

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.base.max_position_embeddings

    @property
    def rotation(self) -> Rotation:
        """That of the base, if some layer rotates queries and keys."""
        rope = MixerPositions("rope")
        rotates = any(each.name == ATTENTION or each.takes(rope) for each in self.token_mixers)
        return self.base.rotation if rotates else Rotation(theta=self.base.rotation.theta)

    @property
    def linears(self) -> TernaryLinears | None:
        return self.base.linears

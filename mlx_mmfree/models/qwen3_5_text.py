"""The text models of Qwen3.5: three layers of Gated DeltaNet to one of gated softmax attention.

Ternary Bonsai 27B is of this type, with weights in MLX's affine 2-bit format. The Hub stores the gain of
most norms less 1, mlx-lm stores it as it is, and the shape of the convolutions tells which of them wrote
a file. The shape of one tap does not, so that the file must name its writer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import CheckpointError
from ..files.declared import declare
from ..layers.matrix import StoredLayout
from ..layers.mixer import TokenMixer
from ..layers.norms import store_less_one
from ..token_mixers import GQA, AttentionNorms, GatedDeltaNet
from .parts.architecture import Architecture, GGUFFormat, LeftOut, Published, draw_weights
from .parts.fields import agreed, integer, key, number, section
from .parts.stack import Decoder
from .parts.ternary_linears import PACKED_FORMATS, linear_of
from .parts.transformer import TINY, TransformerConfig, build_transformer, weight_names

LINEAR, FULL = "linear_attention", "full_attention"

_MIXER_NAMES = {
    LINEAR: {
        "in_proj_qkv": "qkv_proj",
        "in_proj_z": "gate_proj",
        "in_proj_b": "beta_proj",
        "in_proj_a": "decay_proj",
        "conv1d": "qkv_conv",
        "A_log": "decay_log",
        "dt_bias": "step_bias",
        "norm": "output_norm",
        "out_proj": "out_proj",
    },
    FULL: {
        "q_proj": "query_proj",
        "k_proj": "key_proj",
        "v_proj": "value_proj",
        "o_proj": "output_proj",
        "q_norm": "query_norm",
        "k_norm": "key_norm",
    },
}
_PARENTS = {LINEAR: "linear_attn", FULL: "self_attn"}

_VISION, _PREDICTION = (
    LeftOut("the vision model"),
    LeftOut("the prediction of several tokens at once"),
)
WEIGHT_NAMES = {
    **weight_names(),
    **{
        f"model.layers.{{}}.{_PARENTS[kind]}.{theirs}": f"blocks.{{}}.token_mixer.{ours}"
        for kind, names in _MIXER_NAMES.items()
        for theirs, ours in names.items()
    },
    "model.visual": _VISION,
    "vision_tower": _VISION,
    "mtp": _PREDICTION,
    "model.mtp": _PREDICTION,
}

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head": "lm_head",
    "language_model.mtp.": "mtp.",
    "model.language_model.": "model.",
}


def newer_name(name: str, names: Collection[str]) -> str:
    """Like `Architecture.newer_name`: without the prefixes of the text model within others."""
    for theirs, ours in _PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


@dataclass(frozen=True)
class Config(TransformerConfig):
    """The description of one text model, alone or within a model of texts and pictures."""

    model_type: ClassVar[str] = "qwen3_5_text"
    hub_class: ClassVar[str] = "Qwen3_5ForCausalLM"
    fixed: ClassVar[Mapping[str, Any]] = {
        name: value
        for name, value in TransformerConfig.fixed.items()
        if name != "partial_rotary_factor"
    } | {"attn_output_gate": True, "output_gate_type": "swish", "num_experts": 0}
    default_theta: ClassVar[float | None] = None

    vocab_size: int = key("Number of tokens V.", integer, 248320, high=2**24)
    intermediate_size: int = key("Width of the channel mixer.", integer, 12288)
    num_attention_heads: int = key("Query heads of a full layer.", integer, 16, high=2**12)
    num_key_value_heads: int = key("Its key and value heads.", integer, 4, high=2**12)
    head_dim: int = key("Dims of one of its heads.", integer, 256, high=2**12)
    linear_num_key_heads: int = key("Heads of keys of a linear layer.", integer, 16, high=2**12)
    linear_num_value_heads: int = key("Heads of values of one.", integer, 32, high=2**12)
    linear_key_head_dim: int = key("Dims of a key of one.", integer, 128, high=2**12)
    linear_value_head_dim: int = key("Dims of a value of one.", integer, 128, high=2**12)
    linear_conv_kernel_dim: int = key("Taps of its convolution.", integer, 4, high=1024)
    max_position_embeddings: int = key("The longest text of training.", integer, 32768, high=2**40)
    partial_rotary_factor: float = key(
        "The share of a head's dims that is rotated.", number, 0.25, low=1e-3, high=1.0
    )
    layer_types: tuple[str, ...] = declare("For each layer, linear or full attention.", ())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_types:
            object.__setattr__(self, "layer_types", _layer_types(self.num_hidden_layers, 4))
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise CheckpointError(
                "[config.json] 'linear_num_value_heads' must be a multiple of 'linear_num_key_heads', "
                f"{self.linear_num_key_heads}, but got {self.linear_num_value_heads}."
            )
        if self.rotary_dims % 2 or not self.rotary_dims:
            raise CheckpointError(
                "[config.json] 'partial_rotary_factor' must leave an even number of the "
                f"{self.head_dim} dims of a head to be rotated but leaves {self.rotary_dims}."
            )

    @property
    def rotary_dims(self) -> int:
        """The first dims of a head, which are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hub(cls, config: Mapping[str, Any]) -> Self:
        given = _of_text(config)
        scaling_key = "rope_scaling" if section(given, "rope_scaling") else "rope_parameters"
        scaling = dict(section(given, scaling_key))
        # of texts, all sections have the same positions, in whatever order they stand
        for name in ("mrope_section", "mrope_interleaved"):
            scaling.pop(name, None)
        factor = "partial_rotary_factor"
        nested = {f"'{factor}' of '{scaling_key}'": scaling.pop(factor, None)}
        share = agreed({**nested, f"'{factor}'": given.get(factor)})
        own = {} if share is None else {factor: share}
        found = super().from_hub({**given, scaling_key: scaling, "layer_types": None, **own})
        return replace(found, layer_types=_read_layers(given, found.num_hidden_layers))

    def to_hub(self) -> dict[str, Any]:
        config = super().to_hub()
        theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {}
        rotary = {"rope_theta": theta, "partial_rotary_factor": config.pop("partial_rotary_factor")}
        return {
            **config,
            "layer_types": list(self.layer_types),
            "attn_output_gate": True,
            "rope_parameters": {"rope_type": "default", **scaling, **rotary},
            **_interval(self.layer_types),
        }


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that describe the text model, which may stand in a section of their own."""
    inner = section(config, "text_config")
    if not inner:
        return config
    # as in transformers, the head is tied as the key outside says
    key = "tie_word_embeddings"
    tied = inner.get(key) if config.get(key) is None else config[key]
    return {**config, **inner, "text_config": None, key: bool(tied)}


def _layer_types(count: int, interval: int) -> tuple[str, ...]:
    return tuple(LINEAR if (n + 1) % interval else FULL for n in range(count))


def _interval(kinds: tuple[str, ...]) -> dict[str, Any]:
    """The key by which mlx-lm knows the kinds of layers, where one of them repeats evenly."""
    for interval in range(1, len(kinds) + 2):
        if kinds == _layer_types(len(kinds), interval):
            return {"full_attention_interval": interval}
    return {}


def _read_layers(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    interval = integer(config, "full_attention_interval", 4, high=2**16)
    kinds = config.get("layer_types")
    if kinds is None:
        return _layer_types(count, interval)
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {LINEAR, FULL}:
        raise CheckpointError(
            f"[config.json] 'layer_types' must name {LINEAR} or {FULL} for each of the {count} layers "
            f"but got {kinds!r:.100}."
        )
    return tuple(kinds)


def build(config: Config) -> Decoder:
    """A model with fresh weights, in its training variant."""
    model = build_transformer(config)
    rope = config.rotation.build(config.rotary_dims)
    norms = [model.norm]
    for layer, (block, kind) in enumerate(zip(model.blocks, config.layer_types, strict=True)):
        path = f"model.layers.{layer}.{_PARENTS[kind]}"
        linear = {
            ours: linear_of(config.linears, f"{path}.{theirs}")
            for theirs, ours in _MIXER_NAMES[kind].items()
        }
        eps = config.rms_norm_eps
        mixer: TokenMixer
        if kind == LINEAR:
            mixer = GatedDeltaNet(
                config.hidden_size,
                num_heads=config.linear_num_key_heads,
                num_value_heads=config.linear_num_value_heads,
                head_dim=config.linear_key_head_dim,
                value_head_dim=config.linear_value_head_dim,
                conv_size=config.linear_conv_kernel_dim,
                linear=linear,
                norm_eps=eps,
                is_stacked=True,
            )
        else:
            mixer = GQA(
                config.hidden_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                linear=linear,
                bias=config.attention_bias,
                is_gated=True,
                rope=rope,
                norms=AttentionNorms(eps),
            )
            norms += [mixer.query_norm, mixer.key_norm]
        block.token_mixer = draw_weights(mixer, config.initializer_range)
        norms += [block.token_norm, block.channel_norm]
    for norm in norms:
        store_less_one(norm)
    return model


def layouts(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], writer: str | None
) -> dict[str, StoredLayout]:
    """Like `Architecture.layouts`: of a file that is laid out as mlx-lm or GGUF has it."""
    taps = [shape for name, shape in shapes.items() if name.endswith("conv1d.weight")]
    if taps and all(len(shape) == 2 for shape in taps):
        return _layouts_of_gguf(model)
    if any(shape[1:] == (1, 1) for shape in taps):
        if writer not in ("pt", "mlx"):
            raise CheckpointError(
                "[load] the metadata of the weights must name their writer under 'format', pt or mlx, "
                f"where 'linear_conv_kernel_dim' is 1, but name {writer!r:.40}. The gains of norms are "
                "stored less 1 by one of them. Save the model again with transformers or mlx-lm."
            )
        is_of_mlx = writer == "mlx"
    else:
        # a file without a linear layer tells by the names of mlx-lm
        is_of_mlx = all(shape[-1] == 1 for shape in taps) if taps else _has_names_of_mlx(shapes)
    return layouts_of_mlx(model) if is_of_mlx else {}


def layouts_of_mlx(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    writer: str | None = "mlx",
) -> dict[str, StoredLayout]:
    """Like `Architecture.layouts`, of a file that is laid out as mlx-lm has it."""
    found: dict[str, StoredLayout] = {}
    for path, module in model.named_modules():
        weight = module.get("weight")
        if "stored_layouts" in vars(module):
            found[f"{path}.weight"] = StoredLayout.reshaped(weight.shape, weight.shape)
        elif path.endswith("qkv_conv"):
            dims, _, size = weight.shape
            found[f"{path}.weight"] = StoredLayout.reshaped((dims, size, 1), weight.shape)
    return found


def _layouts_of_gguf(model: nn.Module) -> dict[str, StoredLayout]:
    """Like `GGUFFormat.layouts`: mlx-lm's gains, taps without an axis, and no logarithms of rates."""
    found = layouts_of_mlx(model)
    for path, module in model.named_modules():
        if path.endswith("qkv_conv"):
            dims, _, size = module.weight.shape
            found[f"{path}.weight"] = StoredLayout.reshaped((dims, size), module.weight.shape)
        elif "decay_log" in module:
            shape = module.decay_log.shape
            found[f"{path}.decay_log"] = StoredLayout(shape, _log_of_rates, _rates, changes=True)
    return found


def _log_of_rates(rates: mx.array) -> mx.array:
    return mx.log(-rates.astype(mx.float32))


def _rates(logs: mx.array) -> mx.array:
    return -mx.exp(logs.astype(mx.float32))


def _has_names_of_mlx(names: Collection[str]) -> bool:
    return any(name.startswith("language_model.") for name in names)


_GGUF_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_GGUF_NAMES = {
    # by which files without a linear layer tell that their norms have the whole gain
    "output_norm.weight": "language_model.model.norm.weight",
    "blk.{}.post_attention_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    **{
        f"blk.{{}}.{theirs}": f"model.layers.{{}}.linear_attn.{hub}"
        for theirs, hub in {
            "attn_qkv.weight": "in_proj_qkv.weight",
            "attn_gate.weight": "in_proj_z.weight",
            "ssm_beta.weight": "in_proj_b.weight",
            "ssm_alpha.weight": "in_proj_a.weight",
            "ssm_conv1d.weight": "conv1d.weight",
            "ssm_norm.weight": "norm.weight",
            "ssm_out.weight": "out_proj.weight",
            "ssm_dt.bias": "dt_bias",
            "ssm_a": "A_log",
        }.items()
    },
}
_WITH_VALUES = ("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")


def _read_gguf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Like `GGUFFormat.read`."""
    found: dict[str, Any] = {
        hub: integer(given, theirs, high=2**12) for theirs, hub in _GGUF_KEYS.items()
    }
    heads, width = found["linear_num_value_heads"], integer(given, "ssm.inner_size")
    if width % heads or heads % found["linear_num_key_heads"]:
        raise CheckpointError(
            "[GGUF] 'qwen35.ssm.inner_size' must be a multiple of 'qwen35.ssm.time_step_rank', and that "
            f"of 'qwen35.ssm.group_count', but got {width}, {heads} and "
            f"{found['linear_num_key_heads']}. Fetch the file again."
        )
    rotated = integer(given, "rope.dimension_count") / integer(given, "attention.key_length")
    return found | {"linear_value_head_dim": width // heads, "partial_rotary_factor": rotated}


def _gguf_heads(name: str, config: Mapping[str, Any]) -> tuple[int, np.ndarray] | None:
    """Like `GGUFFormat.heads`: of heads of values with one key head, all first ones come first."""
    layer, _, end = name.partition(".linear_attn.")
    if not end or not layer:
        return None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values:
        return None
    dims = config["linear_value_head_dim"]
    # the head of the Hub with number j * shared + r has the number r * keys + j in the file
    order = np.arange(values).reshape(-1, keys).T.reshape(-1)
    wide = (order[:, None] * dims + np.arange(dims)).reshape(-1)
    if end in _WITH_VALUES:
        return 0, wide if end == _WITH_VALUES[0] else order
    if end == "out_proj.weight":
        return 1, wide
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        before = 2 * keys * config["linear_key_head_dim"]
        return 0, np.concatenate([np.arange(before), before + wide])
    return None


def _write_gguf(config: Config) -> dict[str, Any]:
    """Like `GGUFFormat.write`. Of texts, all sections of the positions are equal."""
    third, half = -(-config.rotary_dims // 6), config.rotary_dims // 2
    hub = config.to_hub()
    return {
        **{key: hub[name] for key, name in _GGUF_KEYS.items()},
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_count": config.rotary_dims,
        "rope.dimension_sections": [third, third, half - 2 * third, 0],
    }


def _gguf_name(config: Config) -> str | None:
    """Like `Architecture.gguf_name`: llama.cpp knows full layers that repeat evenly."""
    return "qwen35" if _interval(config.layer_types) else None


_GGUF = GGUFFormat(
    {"model_type": "qwen3_5_text"},
    own_keys=(
        *_GGUF_KEYS,
        *("ssm.inner_size", "rope.dimension_count", "rope.dimension_sections", "rope.freq_base"),
        "attention.key_length",
    ),
    read=_read_gguf,
    write=_write_gguf,
    names=_GGUF_NAMES,
    heads=_gguf_heads,
    layouts=_layouts_of_gguf,
    may_be_rotated=True,
    left_out="nextn_predict_layers",
)


def _needs_mlx_lm_file(config: Config, ternary_dims: Sequence[int]) -> bool | None:
    """Like `Architecture.mlx_lm`: mlx-lm knows full layers that repeat evenly, and no ternary linears.

    Of convolutions of one tap it does not see who wrote them.
    """
    is_known = bool(_interval(config.layer_types)) and config.linears is None
    is_reported = config.linear_conv_kernel_dim > 1
    return False if is_known and is_reported and not config.mlp_bias else None


def _why_not_in_transformers(config: Config) -> str | None:
    """Like `Architecture.transformers`."""
    if config.mlp_bias:
        return "its feed-forward has no bias in this architecture"
    return None if config.linears is None else "its Qwen3.5 has no ternary linears"


def _few_bit_sampling(is_rotated: bool, thinks: bool) -> Mapping[str, float]:
    """Like `Architecture.few_bit_sampling`: settings of Bonsai's demonstration and Bonsai 2's card."""
    if not is_rotated:
        return {"temp": 0.7, "top_p": 0.95, "top_k": 20}
    if thinks:
        return {"temp": 1.0, "top_p": 0.95, "top_k": 20}
    return {"temp": 0.7, "top_p": 0.8, "top_k": 20, "presence_penalty": 1.5}


ARCHITECTURE = Architecture(
    name="qwen3_5_text",
    config=Config,
    build=build,
    weight_names=WEIGHT_NAMES,
    newer_name=newer_name,
    layouts=layouts,
    packed_formats=(*PACKED_FORMATS, "hadamard"),
    is_ternarizable=True,
    why_no_base="it is a hybrid itself, of recurrent layers and layers with a gated attention",
    mlx_lm=_needs_mlx_lm_file,
    name_in_mlx_lm="qwen3_5",
    within_mlx_lm="language_model.",
    transformers=_why_not_in_transformers,
    gguf={"qwen35": _GGUF},
    gguf_name=_gguf_name,
    tiny={
        **TINY,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": [LINEAR, FULL],
        "rope_theta": 1e7,
    },
    presets={
        "ternary-bonsai-27b": {
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "rope_theta": 1e7,
            "max_position_embeddings": 262144,
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "torch_dtype": "float16",
        }
    },
    few_bit_sampling=_few_bit_sampling,
    published={
        "prism-ml/Ternary-Bonsai-27B-mlx-2bit": Published("MLX affine, 2 bits", "reference"),
        "prism-ml/Ternary-Bonsai-27B-unpacked": Published("16-bit, ternary by group", "definition"),
    },
)

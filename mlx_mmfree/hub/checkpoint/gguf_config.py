"""Translates the metadata and tensor names of GGUF files into the Hub's, and back.

Rotary positions are metadata under `rope.` and the tensor `rope_freqs`. `rope.scaling.type` is `linear`
or `yarn`. Llama 3's scaling is a factor for each pair of dims, in `rope_freqs.weight`. llama.cpp itself
multiplies by YaRN's usual attention factor, so the file holds the quotient. `longrope` has its factors
in two tensors, which are read where they are equal. Other kinds of scaling have no format in GGUF.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...layers.attention.positions import rope_wavelengths, yarn_attention_factor
from ...models import architectures
from ...models.parts.architecture import GGUFFormat
from ...models.parts.rotation import Rotation

ROPE_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
"""The factors of `longrope`, for texts up to the original length and beyond it."""
ROPE_KEYS = {
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
"""The metadata that `read_scaling` reads, or that changes no result."""

_WITH_FACTORS = ("llama", "minicpm")
_MAX_FACTORS = 2**11


def read_scaling(
    given: Mapping[str, Any], factors: Mapping[str, np.ndarray], context_length: Any
) -> dict[str, Any] | None:
    """The value of `rope_scaling` in `config.json`; `None` if positions are not scaled.

    Args:
        given: The metadata of the architecture, without its prefix.
        factors: The values of the tensors with factors, by their names.
        context_length: The length of the longest text.

    Raises:
        CheckpointError: A value is not a number.
        UnsupportedModelError: The file asks for several kinds of scaling at once.
    """
    factor = given.get("rope.scaling.factor")
    kind = given.get("rope.scaling.type", "linear" if factor else "none")
    attention = given.get("rope.scaling.attn_factor", 1.0)
    is_long = kind == "longrope"
    is_plain = kind == "none" or not (factor or is_long)
    wanted = {SHORT_FACTORS, LONG_FACTORS} if is_long else {ROPE_FACTORS}
    is_placed = factors.keys() == wanted if is_long else factors.keys() <= wanted
    if (factors and not (is_plain or is_long)) or (attention != 1.0 and kind != "yarn"):
        raise UnsupportedModelError(
            f"[GGUF] 'rope.scaling.type' must be yarn for 'rope.scaling.attn_factor' and none beside "
            f"{ROPE_FACTORS!r} but got {kind!r:.40}. Use another file."
        )
    if not is_placed:
        raise CheckpointError(
            f"[GGUF] the file must hold {' and '.join(map(repr, sorted(wanted)))} for "
            f"'rope.scaling.type' {kind!r} but holds {', '.join(map(repr, sorted(factors))) or 'none'}. "
            "Fetch the file again."
        )
    if factors:
        listed = {name: [float(value) for value in array] for name, array in factors.items()}
        plain = listed.get(ROPE_FACTORS)
        length = given.get("rope.scaling.original_context_length") if is_long else None
        return {
            "rope_type": "longrope",
            "short_factor": listed.get(SHORT_FACTORS, plain),
            "long_factor": listed.get(LONG_FACTORS, plain),
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length or context_length,
        }
    if is_plain:
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    return _yarn(given, factor, attention, context_length)


def _yarn(
    given: Mapping[str, Any], factor: Any, attention: Any, context_length: Any
) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": given.get(
            "rope.scaling.original_context_length", context_length
        ),
        "beta_fast": given.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": given.get("rope.scaling.yarn_beta_slow"),
    }
    if attention != 1.0:
        if type(attention) is not float or type(factor) is not float:
            raise CheckpointError(
                "[GGUF] 'rope.scaling.attn_factor' and 'rope.scaling.factor' must be numbers but got "
                f"{attention!r:.40} and {factor!r:.40}. Fetch the file again."
            )
        scaling["attention_factor"] = attention * yarn_attention_factor(factor)
    return {key: value for key, value in scaling.items() if value is not None}


def check_rope_factors(name: str, shape: tuple[int, ...]) -> None:
    """Refuses impossible sizes before the tensor is read.

    Raises:
        CheckpointError: The tensor is not a short list.
    """
    if len(shape) != 1 or shape[0] > _MAX_FACTORS:
        raise CheckpointError(
            f"[GGUF] tensor {name!r} must be a list of at most {_MAX_FACTORS} numbers but has "
            f"shape {shape}. Fetch the file again."
        )


def scaling_metadata(rotation: Rotation) -> dict[str, Any]:
    """The metadata of a rotation, without the architecture's prefix."""
    if rotation.scaling not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {
        "rope.scaling.type": rotation.scaling,
        "rope.scaling.factor": rotation.factor,
    }
    if rotation.scaling == "yarn":
        usual = Rotation(scaling="yarn")
        found["rope.scaling.original_context_length"] = rotation.trained_length
        attention = rotation.attention_factor / yarn_attention_factor(rotation.factor)
        if abs(attention - 1.0) > 1e-6:
            found["rope.scaling.attn_factor"] = attention
        for name in ("beta_fast", "beta_slow"):
            if getattr(rotation, name) != getattr(usual, name):
                found[f"rope.scaling.yarn_{name}"] = getattr(rotation, name)
    return found


def scaling_factors(rotation: Rotation, head_dim: int) -> np.ndarray | None:
    """The factor for each pair of a head's dims; `None` if the scaling is not stored as factors."""
    stretched = rotation.build(head_dim).wavelengths
    if rotation.scaling not in ("llama3", "longrope") or stretched is None:
        return None
    return np.asarray(stretched / rope_wavelengths(head_dim, rotation.theta), "<f4")


def rotation_refusal(rotation: Rotation, architecture: str) -> str | None:
    """Why a GGUF file of this architecture cannot hold the rotation; `None` if it can."""
    if rotation.scaling == "dynamic":
        return "positions must not be scaled dynamically, which GGUF has no format for,"
    if rotation.scaling == "yarn" and not rotation.is_rounded:
        return "YaRN must blend from a whole pair of dims ('truncate' true)"
    if rotation.scaling == "longrope" and rotation.attention_factor != 1.0:
        return "longrope must have the attention factor 1"
    has_factors = rotation.scaling in ("llama3", "longrope")
    if has_factors and architecture not in _WITH_FACTORS:
        return f"positions must not be scaled by {rotation.scaling} in architecture {architecture}"
    return None


_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
_NEEDED = (
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "context_length",
)
"""The values that llama.cpp needs too."""

# keys that are checked here, or that change no result
_CHECKED = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "pooling_type",
    "rope.scaling.type",
    "tensor_data_layout",
    *ROPE_KEYS,
}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# norms inside ternary linears, of BitNet's embedding models
_BLOCK_NAMES |= {
    f"{ours}_norm_in": f"{hub}.norm" for ours, hub in _BLOCK_NAMES.items() if hub.endswith("_proj")
}
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.", re.ASCII)
_HUB_LAYER = re.compile(r"model\.layers\.([0-9]+)\.", re.ASCII)
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)", re.ASCII)


def formats() -> dict[str, GGUFFormat]:
    """The architectures that are read, by their names in `general.architecture`."""
    found = (each.gguf for each in architectures().values())
    return {name: format for names in found for name, format in names.items()}


def find_format(metadata: Mapping[str, Any]) -> GGUFFormat:
    """The architecture that `general.architecture` names.

    Raises:
        UnsupportedModelError: The architecture is not implemented.
    """
    name = metadata.get("general.architecture")
    known = formats()
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(
            f"[GGUF] 'general.architecture' must be one of {', '.join(sorted(known))} but got "
            f"{name!r:.80}. Other architectures are not read from GGUF files."
        )
    return known[name]


def hub_config(
    metadata: Mapping[str, Any],
    vocab_size: int,
    *,
    is_tied: bool,
    rope_factors: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[str, Any]:
    """The content of the Hub's `config.json`.

    Args:
        metadata: The metadata of a file whose architecture is known.
        vocab_size: The rows of the embedding.
        is_tied: Whether the file has no head of its own.
        rope_factors: The values of the tensors with factors, by their names.

    Raises:
        CheckpointError: An entry is missing.
        UnsupportedModelError: An entry asks for mathematics that are not implemented.
    """
    format = find_format(metadata)
    prefix = f"{metadata['general.architecture']}."
    given = {
        key.removeprefix(prefix): _plain(value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    for key in (*_NEEDED, *format.own_keys):
        if key not in given:
            raise CheckpointError(
                f"[GGUF] '{prefix}{key}' must be given but is missing. Fetch the file again."
            )
    given["block_count"] = model_blocks(metadata, format)
    given.pop(format.left_out, None)
    config = dict(format.config) | {_KEYS[key]: given[key] for key in _KEYS if key in given}
    config |= {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    _check_rest(prefix, given, format)
    config |= format.read(given)
    # what llama.cpp takes for the keys that may be absent
    heads = given["attention.head_count"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", given["embedding_length"] // heads)
    config.setdefault("rope_theta", 10000.0)
    scaling = read_scaling(given, rope_factors, given["context_length"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    for key, ours in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[ours] = number
    return config


def model_blocks(metadata: Mapping[str, Any], format: GGUFFormat) -> Any:
    """The number of the model's blocks, without those after them that are never read.

    Raises:
        CheckpointError: The two numbers do not belong together.
    """
    prefix = f"{metadata['general.architecture']}."
    count, others = (
        metadata.get(prefix + key, 0) if key else 0 for key in ("block_count", format.left_out)
    )
    if others == 0:
        return count
    if type(count) is not int or type(others) is not int or not 0 < others < count:
        raise CheckpointError(
            f"[GGUF] '{prefix}{format.left_out}' must be less than '{prefix}block_count' but got "
            f"{others!r:.40} of {count!r:.40}. Fetch the file again."
        )
    return count - others


def is_left_out(name: str, blocks: int) -> bool:
    """Returns whether a tensor belongs to a block after the model's own."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= blocks


def _plain(value: Any) -> Any:
    """A value as a plain number: the shortest decimal for 32 bits, and one number for equal ones."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_rest(prefix: str, given: Mapping[str, Any], format: GGUFFormat) -> None:
    heads = given["attention.head_count"]
    dims = given["embedding_length"]
    if not all(type(size) is int and size > 0 for size in (heads, dims)):
        raise UnsupportedModelError(
            f"[GGUF] '{prefix}embedding_length' and '{prefix}attention.head_count' must be one "
            f"positive number for all blocks but got {dims!r:.40} and {heads!r:.40}. Other models are "
            "not read."
        )
    head_dim = given.get("attention.key_length", dims // heads)
    if type(head_dim) is not int:
        raise UnsupportedModelError(
            f"[GGUF] '{prefix}attention.key_length' must be one number for all blocks but got "
            f"{head_dim!r:.40}. Other models are not read."
        )
    fixed = {
        "attention.causal": (True,),
        "attention.value_length": (head_dim,),
        # a softmax, whose chosen part is divided by its sum
        "expert_gating_func": (1,),
        "expert_weights_norm": (True,),
        "rope.dimension_count": (head_dim,),
        "rope.scaling.type": ("none", "linear", "yarn", "longrope"),
    }
    for key, value in given.items():
        allowed = None if key in format.own_keys else fixed.get(key)
        if allowed is None and key in {*_KEYS, *_CHECKED, *format.own_keys}:
            continue
        # further entries change something only if they are neither zero nor off
        if value not in (allowed or (0, False, "")):
            rule = f"be {' or '.join(map(str, allowed))}" if allowed else "be absent"
            raise UnsupportedModelError(
                f"[GGUF] {prefix + key!r:.120} must {rule} but got {value!r:.80}. Other values are not "
                "implemented; use another checkpoint."
            )


def hub_name(name: str, format: GGUFFormat) -> str:
    """The Hub's name of a tensor. A tensor without one keeps its own name."""
    layer = _LAYER.match(name)
    pattern = name if layer is None else f"blk.{{}}.{name[layer.end() :]}"
    if pattern in format.names:
        return format.names[pattern].replace("{}", layer[1] if layer else "")
    module, _, key = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{key}"
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    number, module, key = match.groups()
    ours = (_BLOCK_NAMES | _sub_norm_names(format)).get(module)
    return f"model.layers.{int(number)}.{ours}.{key}" if ours else name


def file_name(name: str, format: GGUFFormat) -> str:
    """The name in GGUF files of a tensor of the Hub, the inverse of `hub_name`.

    Raises:
        KeyError: The architecture has no such tensor.
    """
    layer = _HUB_LAYER.match(name)
    pattern = name if layer is None else f"model.layers.{{}}.{name[layer.end() :]}"
    for ours, hub in format.names.items():
        if pattern == hub:
            return ours.replace("{}", layer[1] if layer else "")
    module, _, key = name.rpartition(".")
    for ours, hub in _NAMES.items():
        if module == hub:
            return f"{ours}.{key}"
    _, _, number, inner = module.split(".", 3)
    # a model of 1bitLLM may have the names of transformers' BitNet
    every_format = (*formats().values(), format)
    names = (*map(_sub_norm_names, every_format), _BLOCK_NAMES)
    ours_by_hub = {hub: ours for table in names for ours, hub in table.items()}
    return f"blk.{number}.{ours_by_hub[inner]}.{key}"


def _sub_norm_names(format: GGUFFormat) -> dict[str, str]:
    """The names of the norms before the last projections, by their names in GGUF files."""
    return dict(zip(("attn_sub_norm", "ffn_sub_norm"), format.sub_norms, strict=True))

"""Translates the metadata and tensor names of GGUF files into those of the Hub, and back."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError, UnsupportedModelError
from ...models import architectures
from ...models.parts.architecture import GGUFForm
from . import gguf_rotation

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
"""What llama.cpp needs too."""

# keys that are checked here, or that change no result
_CHECKED = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "tensor_data_layout",
    *gguf_rotation.KEYS,
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
_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.(\w+)\.(weight|bias)", re.ASCII)


def forms() -> dict[str, GGUFForm]:
    """The architectures that are read, by their names in `general.architecture`."""
    found = (each.gguf for each in architectures().values())
    return {name: form for names in found for name, form in names.items()}


def find_form(metadata: Mapping[str, Any]) -> GGUFForm:
    """The architecture that `general.architecture` names.

    Raises:
        UnsupportedModelError: The architecture is not implemented, or the weights are rotated.
    """
    name = metadata.get("general.architecture")
    known = forms()
    if not isinstance(name, str) or name not in known:
        raise UnsupportedModelError(
            f"[GGUF] 'general.architecture' must be one of {', '.join(sorted(known))} but got "
            f"{name!r:.80}. Other architectures are not read from GGUF files."
        )
    rotated = next((key for key in metadata if key.startswith("prism.hadamard")), None)
    if rotated is not None:
        raise UnsupportedModelError(
            f"[GGUF] {rotated!r:.80} must be absent: weights in a rotated basis, as those of Ternary "
            "Bonsai 2, are not read. Use a file of the first generation."
        )
    return known[name]


def hub_config(
    metadata: Mapping[str, Any],
    vocab_size: int,
    *,
    is_tied: bool,
    rope_factors: np.ndarray | None = None,
) -> dict[str, Any]:
    """The content of the Hub's `config.json`.

    Args:
        metadata: The metadata of a file whose architecture is known.
        vocab_size: The rows of the embedding.
        is_tied: Whether the file has no head of its own.
        rope_factors: The values of the tensor `rope_freqs.weight`.

    Raises:
        CheckpointError: An entry is missing.
        UnsupportedModelError: An entry asks for mathematics that are not implemented.
    """
    form = find_form(metadata)
    prefix = f"{metadata['general.architecture']}."
    given = {
        key.removeprefix(prefix): _plain(value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    for key in _NEEDED:
        if key not in given:
            raise CheckpointError(
                f"[GGUF] '{prefix}{key}' must be given but is missing. Fetch the file again."
            )
    config = dict(form.config) | {_KEYS[key]: given[key] for key in _KEYS if key in given}
    config |= {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    _check_rest(prefix, given)
    # what llama.cpp takes for the keys that may be absent
    heads = given["attention.head_count"]
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", given["embedding_length"] // heads)
    config.setdefault("rope_theta", 10000.0)
    scaling = gguf_rotation.read_scaling(given, rope_factors, given["context_length"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    for key, ours in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[ours] = number
    return config


def _plain(value: Any) -> Any:
    """A value as a plain number: the shortest decimal for 32 bits, and one number for equal ones."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_rest(prefix: str, given: Mapping[str, Any]) -> None:
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
        "rope.dimension_count": (head_dim,),
        "rope.scaling.type": ("none", "linear", "yarn"),
    }
    for key, value in given.items():
        allowed = fixed.get(key)
        if allowed is None and (key in _KEYS or key in _CHECKED):
            continue
        # further entries change something only if they are neither zero nor off
        if value not in (allowed or (0, False, "")):
            rule = f"be {' or '.join(map(str, allowed))}" if allowed else "be absent"
            raise UnsupportedModelError(
                f"[GGUF] {prefix + key!r:.120} must {rule} but got {value!r:.80}. Other values are not "
                "implemented; use another checkpoint."
            )


def hub_name(name: str, form: GGUFForm) -> str:
    """The Hub's name of a tensor. A tensor without one keeps its own name."""
    module, _, key = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{key}"
    match = _BLOCK.fullmatch(name)
    if match is None:
        return name
    number, module, key = match.groups()
    ours = (_BLOCK_NAMES | _sub_norm_names(form)).get(module)
    return f"model.layers.{int(number)}.{ours}.{key}" if ours else name


def file_name(name: str, form: GGUFForm) -> str:
    """The name in GGUF files of a tensor of the Hub, the inverse of `hub_name`.

    Raises:
        KeyError: The architecture has no such tensor.
    """
    module, _, key = name.rpartition(".")
    for ours, hub in _NAMES.items():
        if module == hub:
            return f"{ours}.{key}"
    _, _, number, inner = module.split(".", 3)
    # a model of 1bitLLM may have the names of transformers' BitNet
    every_form = (*forms().values(), form)
    names = (*map(_sub_norm_names, every_form), _BLOCK_NAMES)
    ours_by_hub = {hub: ours for table in names for ours, hub in table.items()}
    return f"blk.{number}.{ours_by_hub[inner]}.{key}"


def _sub_norm_names(form: GGUFForm) -> dict[str, str]:
    """The names of the norms before the last projections, by their names in GGUF files."""
    return dict(zip(("attn_sub_norm", "ffn_sub_norm"), form.sub_norms, strict=True))

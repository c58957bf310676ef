"""PEFT's format of LoRA adapters: transposed factors, and `lora_alpha` over the rank as the scale."""

import math
import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...layers.lora import AdapterKind

_PREFIX = "base_model.model."
_MERGE = "Merge the adapter into its base with PEFT and convert the result."
_CORRECT = "Correct adapter_config.json, or fetch the adapter again."

# what follows the name of a layer, with our name of the tensor and whether it is transposed
_PARTS = {
    "lora_A.weight": ("lora_a", True),
    "lora_B.weight": ("lora_b", True),
    "lora_embedding_A": ("lora_a", True),
    "lora_embedding_B": ("lora_b", True),
    "lora_magnitude_vector": ("m", False),
    "lora_magnitude_vector.weight": ("m", False),
}

# the name of a layer or its end; PEFT reads it as a regular expression, in which ^ is the start
_PLAIN_NAME = re.compile(r"\^?[\w.]+", re.ASCII)

# modules of PEFT around a layer of the model
_AROUND = re.compile(r"\.(?:base_layer|original_module|modules_to_save)(?=\.)")

# options that are read, or that change nothing in the mathematics of a trained adapter
_KNOWN = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
}


def read_options(config: Mapping[str, Any]) -> tuple[AdapterKind, float, float]:
    """The kind, the scale and the dropout of a PEFT configuration.

    Raises:
        CheckpointError: The adapter is not a plain LoRA or DoRA, or a value is of the wrong type.
    """
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"[adapter] 'peft_type' must be LORA but got {config.get('peft_type')!r:.80}. {_MERGE}"
        )
    changing = [key for key, value in config.items() if value and key not in _KNOWN]
    if config.get("bias", "none") != "none":
        changing.append("bias")
    # other initialisations change the weights of the base before the training
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        changing.append("init_lora_weights")
    if changing:
        raise CheckpointError(
            f"[adapter] PEFT's options {', '.join(sorted(changing))} must be left out, as they are not "
            f"supported, but are given. {_MERGE}"
        )
    scale = _scale(config, _number(config, "r", 8), _number(config, "lora_alpha", 8))
    dropout = checked_dropout("lora_dropout", _number(config, "lora_dropout", 0.0))
    return "dora" if config.get("use_dora") else "lora", scale, dropout


def checked_dropout(name: str, value: float) -> float:
    """A dropout that is a probability below 1.

    Raises:
        CheckpointError: The value is not at least 0 and below 1.
    """
    if not 0 <= value < 1:
        raise CheckpointError(
            f"[adapter] '{name}' must be at least 0 and below 1 but got {value}. {_CORRECT}"
        )
    return value


def rename(
    tensors: Mapping[str, mx.array],
) -> tuple[dict[str, dict[str, mx.array]], tuple[tuple[str, mx.array], ...]]:
    """PEFT's tensors by layer, with our names and shapes, and the whole tensors of the base beside them.

    PEFT saves the whole embedding or head of the base with an adapter of it.

    Raises:
        CheckpointError: A tensor is neither part of a LoRA nor of the base, or belongs to DoRA of an
            embedding.
    """
    layers: dict[str, dict[str, mx.array]] = {}
    weights = []
    for name, array in tensors.items():
        suffix = next((suffix for suffix in _PARTS if name.endswith("." + suffix)), None)
        is_whole = suffix is None and name.endswith((".weight", ".bias"))
        if (suffix is None and not is_whole) or not name.startswith(_PREFIX):
            raise CheckpointError(
                f"[adapter] tensor {name!r:.120} must be part of a plain LoRA but is not. {_MERGE}"
            )
        name = name.removeprefix(_PREFIX)
        if suffix is None:
            weights.append((_AROUND.sub("", name), array))
            continue
        part, is_transposed = _PARTS[suffix]
        layer = name[: -len(suffix) - 1]
        layers.setdefault(layer, {})[part] = array.T if is_transposed else array
        if "m" in layers[layer] and f"{_PREFIX}{layer}.lora_embedding_A" in tensors:
            raise CheckpointError(
                f"[adapter] {layer!r:.100} must not be an embedding with PEFT's DoRA, which takes the "
                f"lengths of columns, but is one. {_MERGE}"
            )
    return layers, tuple(weights)


def with_patterns(
    layers: Mapping[str, Mapping[str, mx.array]], config: Mapping[str, Any]
) -> dict[str, dict[str, mx.array]]:
    """The layers with each `lora_b` multiplied so that the one scale of `read_options` suits all.

    In PEFT, a layer that a pattern names may have another rank or alpha.

    Raises:
        CheckpointError: A pattern is more than the name of a layer, its value is not a number, or a
            layer has another rank than the configuration says.
    """
    ranks, alphas = (_patterns(config, name) for name in ("rank_pattern", "alpha_pattern"))
    rank, alpha = _number(config, "r", 8), _number(config, "lora_alpha", 8)
    common = _scale(config, rank, alpha)
    scaled = {}
    for layer, parts in layers.items():
        its_rank, its_alpha = _matched(ranks, layer, rank), _matched(alphas, layer, alpha)
        scaled[layer] = dict(parts)
        found = parts["lora_a"].shape[-1] if "lora_a" in parts else None
        if found is not None and found != its_rank:
            raise CheckpointError(
                f"[adapter] layer {layer!r:.100} must have the rank {its_rank:g} of the configuration "
                f"but has {found}. {_CORRECT}"
            )
        scale = _scale(config, its_rank, its_alpha)
        if scale != common and "lora_b" in parts:
            if not common:
                raise CheckpointError(
                    "[adapter] 'lora_alpha' must not be 0 beside an 'alpha_pattern' but is. "
                    + _MERGE
                )
            scaled[layer]["lora_b"] = parts["lora_b"].astype(mx.float32) * (scale / common)
    return scaled


def _patterns(config: Mapping[str, Any], name: str) -> dict[str, float]:
    given = config.get(name) or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"[adapter] '{name}' must be an object but got {given!r:.80}. {_CORRECT}"
        )
    for key in given:
        if not _PLAIN_NAME.fullmatch(key):
            raise CheckpointError(
                f"[adapter] '{name}' must have names of layers, or their ends, but got {key!r:.80}. "
                f"{_MERGE}"
            )
    return {key: checked_number(f"{name}[{key!r:.40}]", value) for key, value in given.items()}


def _matched(patterns: Mapping[str, float], layer: str, default: float) -> float:
    """The value of the first pattern that names the layer."""
    for key, value in patterns.items():
        if layer == key.removeprefix("^") or layer.endswith(f".{key}"):
            return value
    return default


def _scale(config: Mapping[str, Any], rank: float, alpha: float) -> float:
    if rank < 1:
        raise CheckpointError(f"[adapter] 'r' must be positive but got {rank:g}. {_CORRECT}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def describe(
    kind: AdapterKind,
    scale: float,
    dropout: float,
    tensors: Mapping[str, Mapping[str, mx.array]],
    base: str | None,
    *,
    ties_head: bool,
) -> dict[str, Any]:
    """The `adapter_config.json` of an adapter; `ties_head`: the head's tensors are the embedding's."""
    ranks = {layer: parts["lora_a"].shape[1] for layer, parts in tensors.items()}
    rank = next(iter(ranks.values()))
    others = {layer: found for layer, found in ranks.items() if found != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "bias": "none",
        "ensure_weight_tying": ties_head,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scale * rank,
        "rank_pattern": {f"^{layer}": found for layer, found in others.items()},
        "alpha_pattern": {f"^{layer}": scale * found for layer, found in others.items()},
        "lora_dropout": dropout,
        "target_modules": sorted(tensors),
        "use_dora": kind == "dora",
        "use_rslora": False,
    }


def flatten(
    tensors: Mapping[str, Mapping[str, mx.array]], embeddings: set[str]
) -> dict[str, mx.array]:
    """The tensors by PEFT's names; `embeddings` are the layers that are embeddings."""
    flat: dict[str, mx.array] = {}
    for layer, parts in tensors.items():
        if layer in embeddings:
            suffixes = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
        else:
            suffixes = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
        suffixes["m"] = "lora_magnitude_vector"
        for part, array in parts.items():
            stored = array if part == "m" else mx.contiguous(array.T)
            flat[f"{_PREFIX}{layer}.{suffixes[part]}"] = stored
    return flat


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    return checked_number(name, config.get(name, default))


def checked_number(name: str, value: Any) -> float:
    """A value that is a finite number.

    Raises:
        CheckpointError: The value is not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(
            f"[adapter] '{name}' must be a finite number but got {value!r:.80}. {_CORRECT}"
        )
    return float(value)

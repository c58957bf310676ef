"""Adapters: their folders, in mlx-lm's format and in PEFT's, and how they are put on models.

In mlx-lm's format they are `adapters.safetensors` and `adapter_config.json`.
"""

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import CheckpointError
from ...files.checkpoint_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PEFT_ADAPTER_FILE
from ...files.reading import expanded, read_json_object, real_path
from ...files.tensors import read_arrays
from ...files.writing import new_file, writing
from ...layers.lora import (
    ADAPTER_PARAMETERS,
    AdapterKind,
    adapted,
    adapted_layers,
    adapter_shapes,
    can_adapt,
    remove_adapters,
)
from ...layers.matrix import are_same, matrices, parameters
from ...models import Decoder, TokenModel
from ...models.parts.architecture import WeightNames, layer_numbers, weight_names
from ..remote.download import REPOSITORY_NAME, local_folder
from . import peft_format

_EMBEDDING, _HEAD = "embed", "head"


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from its model.

    Attributes:
        kind: `"lora"` or `"dora"`.
        scale: The factor of the low-rank product.
        dropout: The dropout of its input while training.
        tensors: For each adapted layer, by its name on the Hub: `lora_a` `(D, rank)`, `lora_b`
            `(rank, N)` and, for DoRA, `m` `(N,)`.
        ties_head: Whether an adapter of the embedding also acts on a head that is the same matrix, as in
            mlx-lm. In PEFT's it does so only if it says so.
        weights: Whole tensors that the folder holds too, by their names on the Hub. They must be those
            of the model.
    """

    kind: AdapterKind
    scale: float
    dropout: float
    tensors: Mapping[str, Mapping[str, mx.array]]
    ties_head: bool = True
    weights: tuple[tuple[str, mx.array], ...] = ()


def attach(model: Decoder, adapter: Adapter | None) -> Decoder:
    """Puts an adapter on a model in place of the one that it has. `None` takes that one off.

    The base layers are shared, so that adapters can be switched between two generations.

    Raises:
        CheckpointError: The adapter does not fit the model.
    """
    remove_adapters(model)
    if adapter is None:
        return model
    names = weight_names(model.config)
    _check_weights(model, names, adapter.weights)
    modules = dict(model.named_modules())
    adapted: dict[str, nn.Module] = {}
    for hub_name, parts in _without_tied_head(model, names, adapter).items():
        path = names.module_to_memory(hub_name)
        if path is None or path not in modules or not can_adapt(modules[path]):
            raise CheckpointError(
                f"[adapter] the adapter must belong to the model but has layer {hub_name!r:.100}, which "
                "the model lacks. Use the adapter with the model that it was trained on."
            )
        adapted[path] = _wrapped(hub_name, modules[path], adapter, parts)
    model.freeze()
    model.update_modules(tree_unflatten(list(adapted.items())))
    return model


def with_adapter(model: Decoder, adapter: Adapter) -> Decoder:
    """The same model with an adapter, beside the model itself, with which it shares the weights.

    Raises:
        CheckpointError: The adapter does not fit the model.
    """
    arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shared = {id(array): array for _, array in arrays}
    return attach(deepcopy(model, shared), adapter)


def adapter_of(model: Decoder) -> Adapter:
    """The adapter that is on a model.

    Raises:
        CheckpointError: The model has no adapter.
    """
    names = weight_names(model.config)
    layers = adapted_layers(model)
    if not layers:
        raise CheckpointError(
            "[adapter] 'model' must have an adapter but has none. Train one, or put one on it first."
        )
    first = next(iter(layers.values()))
    return Adapter(
        first.kind,
        first.scale,
        first.dropout_rate,
        {
            names.module_to_disk(name): {
                part: layer[part] for part in ADAPTER_PARAMETERS if part in layer
            }
            for name, layer in sorted(layers.items())
        },
    )


def with_tied_head(
    model: Decoder, tensors: Mapping[str, Mapping[str, mx.array]]
) -> dict[str, Mapping[str, mx.array]]:
    """The tensors by layer, with those of a head that changes because it is the embedding.

    PEFT has an adapter for each of the two. The product of the one is that of the other, transposed.
    """
    names = weight_names(model.config)
    layers = dict(tensors)
    if _is_tied(model, names) and (name := names.module_to_disk(_EMBEDDING)) in layers:
        layers[names.module_to_disk(_HEAD)] = _transposed(layers[name])
    return layers


def _without_tied_head(
    model: Decoder, names: WeightNames, adapter: Adapter
) -> Mapping[str, Mapping[str, mx.array]]:
    """The tensors by layer, without those of a head that is the embedding.

    Raises:
        CheckpointError: The adapter changes one of the two alone, or each of them otherwise.
    """
    layers = dict(adapter.tensors)
    if not _is_tied(model, names):
        return layers
    embedding, head = map(names.module_to_disk, (_EMBEDDING, _HEAD))
    changed = [name for name in (embedding, head) if name in layers]
    of_head = layers.pop(head, None)
    if not changed or (changed == [embedding] and adapter.ties_head):
        return layers
    if of_head is None or embedding not in layers:
        how = f"changes {changed[0]!r:.100} alone"
    elif not _are_equal(of_head, _transposed(layers[embedding])):
        how = "changes each of them otherwise"
    else:
        return layers
    raise CheckpointError(
        "[adapter] the adapter must change the embedding and the head alike, which are one matrix in "
        f"this model, but {how}. Train it with PEFT's ensure_weight_tying=True, or merge it with PEFT "
        "into a model that has a head of its own."
    )


def _is_tied(model: Decoder, names: WeightNames) -> bool:
    """Whether the embedding is the head too, where others of the architecture have a head."""
    return isinstance(model, TokenModel) and _HEAD not in model and names.has_module(_HEAD)


def _transposed(parts: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The low-rank product of an embedding, `(V, rank)` and `(rank, D)`, as that of a head, or back."""
    return {"lora_a": parts["lora_b"].T, "lora_b": parts["lora_a"].T}


def _are_equal(a: Mapping[str, mx.array], b: Mapping[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[part], b[part]) for part in a)


def _check_weights(
    model: Decoder, names: WeightNames, weights: tuple[tuple[str, mx.array], ...]
) -> None:
    """Refuses whole tensors that are not those of the model."""
    held, arrays = matrices(model), parameters(model) if weights else {}
    for hub_name, array in weights:
        path, _, key = (names.to_memory(hub_name) or "").rpartition(".")
        if path == _HEAD and _is_tied(model, names):
            path = _EMBEDDING
        own = arrays.get(f"{path}.{key}")
        is_same = own is not None and (
            array.shape == (held[path].output_dims, held[path].input_dims)
            and held[path].is_made_of(array)
            if key == "weight" and path in held
            else are_same(own, array)
        )
        if not is_same:
            raise CheckpointError(
                f"[adapter] tensor {hub_name!r:.100} of the adapter must be the model's own but is not: "
                "PEFT would replace the model's by it. Give the model that the adapter was trained on, "
                "or merge the adapter into it with PEFT and convert the result."
            )


def _wrapped(
    name: str, base: nn.Module, adapter: Adapter, parts: Mapping[str, mx.array]
) -> nn.Module:
    rank = parts["lora_a"].shape[1]
    wanted = adapter_shapes(base, rank)
    for part, array in parts.items():
        if array.shape != wanted[part]:
            raise CheckpointError(
                f"[adapter] {name!r:.100} must have '{part}' of shape {wanted[part]} but got "
                f"{array.shape}. Use the adapter with the model that it was trained on."
            )
    layer = adapted(base, adapter.kind, rank=rank, scale=adapter.scale, dropout=adapter.dropout)
    for part, array in parts.items():
        layer[part] = array
    return layer


_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_FILE, PEFT_ADAPTER_FILE)
_WAY_OUT = "Train the adapter again, or fetch it again."


def read_adapter(path_or_repo: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter that this library, mlx-lm or PEFT wrote.

    Args:
        path_or_repo: A folder, or a repository `owner/name` of the Hub.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or the adapter asks for something
            that is not a plain LoRA or DoRA.
        DownloadError: The Hub does not hand out the repository.
    """
    path = expanded(path_or_repo)
    if not path.exists() and REPOSITORY_NAME.fullmatch(str(path_or_repo)):
        path = local_folder(str(path_or_repo), patterns=_FILES)
    if not (path / ADAPTER_CONFIG_FILE).exists():
        raise CheckpointError(
            f"[adapter] 'adapter_path' must be a folder with an {ADAPTER_CONFIG_FILE}, or a Hub "
            f"repository with one, but '{path_or_repo}' is neither. Give the folder that 'mmfree lora' "
            "wrote."
        )
    config = read_json_object(path / ADAPTER_CONFIG_FILE)
    if "peft_type" in config:
        kind, scale, dropout = peft_format.read_options(config)
        tensors, weights = peft_format.rename(read_arrays(path / PEFT_ADAPTER_FILE))
        tensors = peft_format.with_patterns(tensors, config)
        ties_head = bool(config.get("ensure_weight_tying"))
        adapter = Adapter(kind, scale, dropout, tensors, ties_head, weights)
    else:
        kind, scale, dropout = _options(config)
        adapter = Adapter(kind, scale, dropout, _grouped(read_arrays(path / ADAPTER_FILE)))
    _check_tensors(path, adapter)
    return adapter


def write_adapter(
    folder: str | os.PathLike[str], model: Decoder, record: Mapping[str, Any]
) -> None:
    """Writes the adapter that is on a model, for this library and for mlx-lm.

    Args:
        folder: The folder, which is made if it is missing. Each of its two files appears only when it is
            complete.
        model: A model with adapters.
        record: How the adapter was made. It is kept in the configuration.

    Raises:
        CheckpointError: The model has no adapter, or the folder cannot be written.
    """
    adapter = adapter_of(model)
    names = weight_names(model.config)
    places = {name: names.in_layer(name) for name in adapter.tensors}
    numbers = layer_numbers(model, names)
    layers = [numbers[place[0]] for place in places.values() if place is not None]
    keys = {name if place is None else place[1] for name, place in places.items()}
    first = next(iter(adapter.tensors.values()))
    config = {
        **record,
        "fine_tune_type": adapter.kind,
        "num_layers": len(numbers) - min(layers) if layers else 0,
        "lora_parameters": {
            "rank": first["lora_a"].shape[1],
            "scale": adapter.scale,
            "dropout": adapter.dropout,
            "keys": sorted(keys),
        },
    }
    flat = {
        f"{name}.{part}": array
        for name, parts in adapter.tensors.items()
        for part, array in parts.items()
    }
    _write_files(Path(folder), config, ADAPTER_FILE, flat)


def write_peft_adapter(
    folder: str | os.PathLike[str], model: Decoder, base: str | None = None
) -> None:
    """Writes the adapter that is on a model in PEFT's format.

    Args:
        folder: The folder, which is made if it is missing.
        model: A model with adapters.
        base: The repository of the base model. It is kept in the configuration.

    Raises:
        CheckpointError: The model has no adapter, or one that PEFT would read differently.
    """
    adapter, layers = adapter_of(model), adapted_layers(model)
    for name, layer in layers.items():
        if "norm" in layer.base:
            raise CheckpointError(
                f"[adapter] '{name}' must have no norm inside for PEFT's format, whose adapters read "
                "the input of the norm, but has one. Keep the adapter in this library's format."
            )
        if layer.kind == "dora" and layer.matrix.is_embedding:
            raise CheckpointError(
                f"[adapter] '{name}' must not be an embedding with DoRA for PEFT's format, which "
                "computes that differently, but is one. Keep the adapter in this library's format."
            )
    tensors = with_tied_head(model, adapter.tensors)
    config = peft_format.describe(
        adapter.kind,
        adapter.scale,
        adapter.dropout,
        tensors,
        base,
        ties_head=len(tensors) > len(adapter.tensors),
    )
    names = weight_names(model.config)
    embeddings = {
        names.module_to_disk(name) for name, layer in layers.items() if layer.matrix.is_embedding
    }
    flat = peft_format.flatten(tensors, embeddings)
    _write_files(Path(folder), config, PEFT_ADAPTER_FILE, flat)


def why_not_in_mlx_lm(model: Decoder) -> str | None:
    """Why mlx-lm refuses the adapter that is on a model; `None` if mlx-lm reads it."""
    for name, layer in adapted_layers(model).items():
        if layer.kind != "dora":
            continue
        matrix = layer.matrix
        if "norm" in layer.base:
            return f"'{name}' has a norm inside, and DoRA of such a layer is not supported there"
        if matrix.is_ternary and matrix.holds_trits and matrix.input_dims % 32:
            return (
                f"the inputs of '{name}' are no multiple of 32, and DoRA of such a layer is not "
                "supported there"
            )
        if matrix.is_embedding and matrix.is_packed:
            return f"'{name}' is a quantised embedding, and DoRA of such a layer is not supported there"
    ranks = {parts["lora_a"].shape[1] for parts in adapter_of(model).tensors.values()}
    return f"its layers have {len(ranks)} different ranks" if len(ranks) > 1 else None


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds the files of an adapter."""
    path = Path(folder)
    return (path / ADAPTER_CONFIG_FILE).is_file() and any(
        (path / name).is_file() for name in _FILES[1:]
    )


def load_adapter_weights(model: Decoder, file: str | os.PathLike[str]) -> None:
    """Loads an `adapters.safetensors` into the adapter that is on a model, in place.

    Raises:
        CheckpointError: The file cannot be read, holds NaN or infinity, or holds an adapter of other
            layers or shapes.
    """
    given = _grouped(read_arrays(real_path(file)))
    _check_finite(given)
    wanted = adapter_of(model).tensors
    names = weight_names(model.config)
    shapes = [
        {
            name: {part: array.shape for part, array in parts.items()}
            for name, parts in tensors.items()
        }
        for tensors in (wanted, given)
    ]
    if shapes[0] != shapes[1]:
        differing = min(n for n in wanted.keys() | given if shapes[0].get(n) != shapes[1].get(n))
        raise CheckpointError(
            f"[adapter] '{file}' must hold an adapter like the one that is trained but layer "
            f"{differing!r:.100} has {shapes[1].get(differing)} instead of {shapes[0].get(differing)}. "
            "Train the same layers with the same rank and type."
        )
    modules = dict(model.named_modules())
    for hub_name, parts in given.items():
        module = modules[names.module_to_memory(hub_name) or ""]
        for part, array in parts.items():
            module[part] = array


def _write_files(
    folder: Path, config: Mapping[str, Any], weights_file: str, tensors: dict[str, mx.array]
) -> None:
    """Writes the configuration and the tensors. Each file appears only when it is complete."""
    needed = sum(array.nbytes for array in tensors.values())
    with writing("adapter", folder):
        with new_file(folder / weights_file, needed) as file:
            mx.save_safetensors(str(file), tensors, {"format": "mlx"})
        with new_file(folder / ADAPTER_CONFIG_FILE) as file:
            file.write_text(json.dumps(config, indent=4, sort_keys=True) + "\n", encoding="utf-8")


def _options(config: Mapping[str, Any]) -> tuple[AdapterKind, float, float]:
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise CheckpointError(
            f"[adapter] 'fine_tune_type' must be lora or dora but got {kind!r:.80}. Weights of a full "
            "fine-tuning are a model, not an adapter: load their folder."
        )
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        raise CheckpointError(
            f"[adapter] 'lora_parameters' must be an object but got {given!r:.80}. {_WAY_OUT}"
        )
    scale, dropout = (
        peft_format.checked_number(name, given.get(name, default))
        for name, default in (("scale", None), ("dropout", 0.0))
    )
    return kind, scale, peft_format.checked_dropout("dropout", dropout)


def _grouped(tensors: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    groups: dict[str, dict[str, mx.array]] = {}
    for name, array in tensors.items():
        layer, _, part = name.rpartition(".")
        if part not in ADAPTER_PARAMETERS:
            raise CheckpointError(
                f"[adapter] tensors must be lora_a, lora_b or m of a layer but got {name!r:.100}. "
                f"{_WAY_OUT}"
            )
        groups.setdefault(layer, {})[part] = array
    return groups


def _check_tensors(folder: Path, adapter: Adapter) -> None:
    wanted = set(ADAPTER_PARAMETERS if adapter.kind == "dora" else ADAPTER_PARAMETERS[:2])
    if not adapter.tensors:
        raise CheckpointError(
            f"[adapter] '{folder}' must hold an adapter but has no tensors. {_WAY_OUT}"
        )
    for layer, parts in adapter.tensors.items():
        shapes = {part: array.shape for part, array in parts.items()}
        is_sound = (
            shapes.keys() == wanted
            and len(shapes["lora_a"]) == len(shapes["lora_b"]) == 2
            and 0 < shapes["lora_a"][1] == shapes["lora_b"][0]
            and all(mx.issubdtype(array.dtype, mx.floating) for array in parts.values())
        )
        if not is_sound:
            raise CheckpointError(
                f"[adapter] layer {layer!r:.100} must have float tensors {', '.join(sorted(wanted))} of "
                f"one rank but got {shapes}. {_WAY_OUT}"
            )
    _check_finite(adapter.tensors)


def _check_finite(tensors: Mapping[str, Mapping[str, mx.array]]) -> None:
    for layer, parts in tensors.items():
        if not all(mx.isfinite(array).all().item() for array in parts.values()):
            raise CheckpointError(
                f"[adapter] layer {layer!r:.100} must be finite but holds NaN or infinity. {_WAY_OUT}"
            )

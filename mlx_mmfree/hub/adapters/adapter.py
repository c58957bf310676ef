"""Adapter folders: `adapters.safetensors` and `adapter_config.json` as mlx-lm has them, or PEFT's."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ...errors import CheckpointError
from ...files.json_file import read_json_object
from ...files.paths import expanded, real_path
from ...files.replacing import new_file, writing
from ...files.safetensors import read_arrays
from ...layers.lora import (
    ADAPTER_PARAMETERS,
    AdapterKind,
    adapted,
    adapted_layers,
    adapter_shapes,
    can_adapt,
    remove_adapters,
)
from ...models import Decoder
from ..checkpoint.names import weight_names
from . import peft_format

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from its model.

    Attributes:
        kind: `"lora"` or `"dora"`.
        scale: Factor of the low-rank part.
        dropout: Dropout of its input while training.
        tensors: For each adapted layer, by its name on the Hub, `lora_a` `(D, rank)`, `lora_b`
            `(rank, N)` and, for DoRA, `m` `(N,)`.
    """

    kind: AdapterKind
    scale: float
    dropout: float
    tensors: Mapping[str, Mapping[str, mx.array]]


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter that this library, mlx-lm or PEFT wrote.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or the adapter asks for something
            that is not a plain LoRA or DoRA.
    """
    path = expanded(folder)
    if not path.is_dir():
        raise CheckpointError(f"[adapter] 'adapter_path' must be a folder but got '{path}'.")
    config = read_json_object(path / CONFIG_FILE)
    if "peft_type" in config:
        kind, scale, dropout = peft_format.read_options(config)
        tensors = peft_format.rename(read_arrays(path / peft_format.WEIGHTS_FILE))
        tensors = peft_format.with_patterns(tensors, config)
    else:
        kind, scale, dropout = _options(config)
        tensors = _grouped(read_arrays(path / WEIGHTS_FILE))
    adapter = Adapter(kind, scale, dropout, tensors)
    _check_tensors(path, adapter)
    return adapter


def write_adapter(
    folder: str | os.PathLike[str], model: Decoder, record: Mapping[str, Any]
) -> None:
    """Writes the adapter that is on a model, for this library and for mlx-lm.

    Args:
        folder: Made where it is missing; the two files appear whole or not at all.
        model: A model with adapters.
        record: How the adapter was made, kept in the configuration.

    Raises:
        CheckpointError: The model has no adapter, or the folder cannot be written.
    """
    adapter = adapter_of(model)
    names = weight_names(model.config)
    places = {name: names.in_layer(name) for name in adapter.tensors}
    layers = [place[0] for place in places.values() if place is not None]
    keys = {name if place is None else place[1] for name, place in places.items()}
    first = next(iter(adapter.tensors.values()))
    config = {
        **record,
        "fine_tune_type": adapter.kind,
        "num_layers": len(model.blocks) - min(layers) if layers else 0,
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
    write_files(Path(folder), config, WEIGHTS_FILE, flat)


def write_peft_adapter(
    folder: str | os.PathLike[str], model: Decoder, base: str | None = None
) -> None:
    """Writes the adapter that is on a model in PEFT's format.

    Args:
        folder: Made where it is missing.
        model: A model with adapters.
        base: Repository of the base model, kept in the configuration.

    Raises:
        CheckpointError: The model has no adapter, or one that PEFT would read differently.
    """
    adapter = adapter_of(model)
    for name, layer in adapted_layers(model).items():
        if "norm" in layer.base:
            raise CheckpointError(
                f"[adapter] '{name}' has a norm inside, and PEFT's adapters read what lies before it: "
                "this adapter cannot be written in PEFT's format. Keep it in this library's."
            )
        if layer.kind == "dora" and layer.matrix.is_embedding:
            raise CheckpointError(
                f"[adapter] '{name}' is an embedding, whose DoRA is another one in PEFT: this adapter "
                "cannot be written in PEFT's format. Keep it in this library's."
            )
    config = peft_format.describe(
        adapter.kind, adapter.scale, adapter.dropout, adapter.tensors, base
    )
    tensors = peft_format.flatten(adapter.tensors, adapter.kind)
    write_files(Path(folder), config, peft_format.WEIGHTS_FILE, tensors)


def why_not_in_mlx_lm(model: Decoder) -> str | None:
    """Why mlx-lm refuses the adapter that is on a model; `None` if it reads it."""
    for name, layer in adapted_layers(model).items():
        if layer.kind != "dora":
            continue
        matrix = layer.matrix
        if "norm" in layer.base:
            return f"'{name}' has a norm inside, and DoRA of such a layer is not supported there"
        if matrix.is_ternary and matrix.storage == "trits" and matrix.input_dims % 32:
            return f"'{name}' has rows of no multiple of 32, whose DoRA is not supported there"
        if matrix.is_embedding and matrix.storage == "codes":
            return f"'{name}' is a quantised embedding, and DoRA of one is not supported there"
    ranks = {parts["lora_a"].shape[1] for parts in adapter_of(model).tensors.values()}
    return f"its layers have {len(ranks)} different ranks" if len(ranks) > 1 else None


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether the files of an adapter lie in a folder."""
    path = Path(folder)
    return (path / CONFIG_FILE).is_file() and any(
        (path / name).is_file() for name in (WEIGHTS_FILE, peft_format.WEIGHTS_FILE)
    )


def load_adapter_weights(model: Decoder, file: str | os.PathLike[str]) -> None:
    """Sets the adapter that is on a model from an `adapters.safetensors`, in place.

    Raises:
        CheckpointError: The file cannot be read, or holds an adapter of other layers or shapes.
    """
    given = _grouped(read_arrays(real_path(file)))
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
        ours = (names.to_memory(f"{hub_name}.weight") or "").removesuffix(".weight")
        for part, array in parts.items():
            modules[ours][part] = array


def attach(model: Decoder, adapter: Adapter | None) -> Decoder:
    """Puts an adapter on a model, in place of the one it has; `None` takes it off.

    The base layers are shared, so adapters can be switched between two generations.

    Raises:
        CheckpointError: The adapter does not fit the model.
    """
    remove_adapters(model)
    if adapter is None:
        return model
    names = weight_names(model.config)
    modules = dict(model.named_modules())
    adapted: dict[str, nn.Module] = {}
    for hub_name, parts in adapter.tensors.items():
        ours = (names.to_memory(f"{hub_name}.weight") or "").removesuffix(".weight")
        if ours not in modules or not can_adapt(modules[ours]):
            raise CheckpointError(
                f"[adapter] the adapter must belong to the model but has layer {hub_name!r:.100}, which "
                "the model lacks. Use the adapter with the model that it was trained on."
            )
        adapted[ours] = _wrapped(hub_name, modules[ours], adapter, parts)
    model.freeze()
    model.update_modules(tree_unflatten(list(adapted.items())))
    return model


def adapter_of(model: Decoder) -> Adapter:
    """The adapter that is on a model.

    Raises:
        CheckpointError: It has none.
    """
    names = weight_names(model.config)
    layers = adapted_layers(model)
    if not layers:
        raise CheckpointError("[adapter] 'model' must have an adapter but has none.")
    first = next(iter(layers.values()))
    return Adapter(
        first.kind,
        first.scale,
        first.dropout_rate,
        {
            names.to_disk(f"{name}.weight").removesuffix(".weight"): {
                part: layer[part] for part in ADAPTER_PARAMETERS if part in layer
            }
            for name, layer in sorted(layers.items())
        },
    )


def write_files(
    folder: Path, config: Mapping[str, Any], weights_file: str, tensors: dict[str, mx.array]
) -> None:
    """Writes configuration and tensors, each file whole or not at all."""
    needed = sum(array.nbytes for array in tensors.values())
    with writing("adapter", folder):
        with new_file(folder / weights_file, needed) as file:
            mx.save_safetensors(str(file), tensors, {"format": "mlx"})
        with new_file(folder / CONFIG_FILE) as file:
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
            f"[adapter] 'lora_parameters' must be an object but got {given!r:.80}."
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
                f"[adapter] tensors must be lora_a, lora_b or m of a layer but got {name!r:.100}."
            )
        groups.setdefault(layer, {})[part] = array
    return groups


def _check_tensors(folder: Path, adapter: Adapter) -> None:
    wanted = set(ADAPTER_PARAMETERS if adapter.kind == "dora" else ADAPTER_PARAMETERS[:2])
    if not adapter.tensors:
        raise CheckpointError(f"[adapter] '{folder}' must hold an adapter but has no tensors.")
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
                f"one rank but got {shapes}."
            )
        if not all(mx.isfinite(array).all().item() for array in parts.values()):
            raise CheckpointError(
                f"[adapter] layer {layer!r:.100} must be finite but holds NaN or infinity. Train the "
                "adapter again or fetch it anew."
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

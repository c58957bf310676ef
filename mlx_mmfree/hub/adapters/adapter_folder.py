"""The folders of adapters, in mlx-lm's format and in PEFT's.

In mlx-lm's format they hold `adapters.safetensors` and `adapter_config.json`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...arguments import check_path
from ...errors import CheckpointError
from ...files.checkpoint_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    PEFT_ADAPTER_FILE,
    TEMPLATE_FILE,
)
from ...files.reading import expanded, json_text, read_json_object, real_path
from ...files.tensors import read_arrays
from ...files.writing import new_file, writing
from ...layers.lora import ADAPTER_PARAMETERS, AdapterKind, adapted_layers
from ...layers.matrix import stored_layouts
from ...models import Decoder
from ...models.parts.architecture import architecture_of, layer_numbers, weight_names
from ...tokenizer.vocabulary import read_template
from ..remote.source import find_source, hub_path
from . import peft_format
from .adapter import Adapter, adapter_of, by_hub_names, with_tied_head

_WEIGHT_FILES = (ADAPTER_FILE, PEFT_ADAPTER_FILE)
_FILES = (ADAPTER_CONFIG_FILE, *_WEIGHT_FILES, TEMPLATE_FILE)
_HINT = "Train the adapter again, or fetch it again."


def read_adapter(path_or_repo: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter that this library, mlx-lm or PEFT wrote.

    Args:
        path_or_repo: A folder, a repository `owner/name` of the Hub, or a folder in one.

    Raises:
        CheckpointError: A file is missing, damaged or inconsistent, or the adapter asks for something
            that is not a plain LoRA or DoRA.
        DownloadError: The Hub does not hand out the repository.
    """
    path = _local(path_or_repo)
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


def adapter_template(path_or_repo: str | os.PathLike[str]) -> str | None:
    """The chat template that an adapter was trained with; `None` if it keeps none of its own.

    Args:
        path_or_repo: As for `read_adapter`.

    Raises:
        CheckpointError: The template is damaged.
        DownloadError: The Hub does not hand out the repository.
    """
    file = _local(path_or_repo) / TEMPLATE_FILE
    return read_template(file) if file.is_file() else None


def _local(path_or_repo: str | os.PathLike[str]) -> Path:
    """The folder of an adapter, downloaded if it is a repository of the Hub."""
    check_path("adapter", "adapter_path", path_or_repo, "a folder or a Hub repository")
    path = expanded(path_or_repo)
    if not path.exists() and hub_path(str(path_or_repo)) is not None:
        return find_source(str(path_or_repo)).fetch(_FILES)
    return path


def write_adapter(
    folder: str | os.PathLike[str],
    model: Decoder,
    record: Mapping[str, Any],
    chat_template: str | None = None,
) -> None:
    """Writes the adapter that is on a model, for this library and for mlx-lm.

    Args:
        folder: The folder, which is made if it is missing. Each of its files appears only when it is
            complete.
        model: A model with adapters.
        record: How the adapter was made. It is kept in the configuration.
        chat_template: The template that it was trained with, if it is not the model's.

    Raises:
        CheckpointError: The model has no adapter, or the folder cannot be written.
    """
    adapter = adapter_of(model)
    names = weight_names(model.config)
    locations = {name: names.in_layer(name) for name in adapter.tensors}
    numbers = layer_numbers(model, names)
    layers = [numbers[location[0]] for location in locations.values() if location is not None]
    within = architecture_of(model.config).within_mlx_lm
    keys = {
        within + name if location is None else location[1] for name, location in locations.items()
    }
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
        f"{within}{name}.{part}": array
        for name, parts in adapter.tensors.items()
        for part, array in parts.items()
    }
    _write_files(Path(folder), config, ADAPTER_FILE, flat, chat_template)


def write_peft_adapter(
    folder: str | os.PathLike[str],
    model: Decoder,
    base: str | None = None,
    chat_template: str | None = None,
) -> None:
    """Writes the adapter that is on a model in PEFT's format.

    Args:
        folder: The folder, which is made if it is missing.
        model: A model with adapters.
        base: The repository of the base model. It is kept in the configuration.
        chat_template: The template that it was trained with, if it is not the model's.

    Raises:
        CheckpointError: The model has no adapter, or one that PEFT would read differently.
    """
    adapter, layers = adapter_of(model), adapted_layers(model)
    experts = _experts(model)
    for name, layer in layers.items():
        if name in experts:
            raise CheckpointError(
                f"[adapter] '{name}' must be one matrix for PEFT's format but holds one of each expert, "
                "whose adapter has a part that all of them share. Keep the adapter in this library's "
                "format, or leave such layers out by 'keys'."
            )
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
    _write_files(Path(folder), config, PEFT_ADAPTER_FILE, flat, chat_template)


def _experts(model: Decoder) -> set[str]:
    """The paths of layers that hold the matrices of several experts, which have an axis on disk."""
    layouts = stored_layouts(model)
    return {path.removesuffix(".weight") for path, each in layouts.items() if len(each.shape) == 3}


def why_not_in_mlx_lm(model: Decoder) -> str | None:
    """Why mlx-lm refuses the adapter that is on a model; `None` if mlx-lm reads it."""
    experts = _experts(model)
    for name, layer in adapted_layers(model).items():
        if name in experts:
            return f"'{name}' has experts, whose adapters share a part here and none there"
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
    """Returns whether a folder holds the files of an adapter."""
    path = Path(folder)
    return (path / ADAPTER_CONFIG_FILE).is_file() and any(
        (path / name).is_file() for name in _WEIGHT_FILES
    )


def adapter_options(file: str | os.PathLike[str]) -> dict[str, Any]:
    """How the adapter in an `adapters.safetensors` was made, from the configuration beside the file.

    Returns:
        Its `fine_tune_type` and `scale`, and as far as the configuration has them its `rank`,
        `num_layers` and `keys`.

    Raises:
        CheckpointError: The file or its configuration is missing, or not of this library or mlx-lm.
    """
    if not real_path(file).is_file():
        is_folder = real_path(file).is_dir()
        raise CheckpointError(
            f"[adapter] '{file}' must be a file with the tensors of an adapter but "
            + (
                f"is a folder. Give its {ADAPTER_FILE}."
                if is_folder
                else "there is none. Correct its name."
            )
        )
    path = real_path(file).parent / ADAPTER_CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"[adapter] '{file}' must have an {ADAPTER_CONFIG_FILE} beside it, which holds the scale of "
            f"the adapter, but '{path}' does not exist. Copy it from the folder of the adapter."
        )
    config = read_json_object(path)
    if "peft_type" in config:
        raise CheckpointError(
            f"[adapter] '{file}' must be an adapter in this library's or mlx-lm's format but is one of "
            "PEFT. Merge it into its base first with 'mmfree fuse'."
        )
    kind, scale, _ = _options(config)
    given = {name: config["lora_parameters"].get(name) for name in ("rank", "keys")}
    # an adapter outside of the blocks has none of the layers
    given["num_layers"] = config.get("num_layers") or None
    known = {name: value for name, value in given.items() if value is not None}
    return {"fine_tune_type": kind, "scale": scale, **known}


def load_adapter_weights(model: Decoder, file: str | os.PathLike[str]) -> None:
    """Loads an `adapters.safetensors` into the adapter that is on a model, in place.

    Raises:
        CheckpointError: The file cannot be read, holds NaN or infinity, or holds an adapter of other
            layers or shapes.
    """
    given = by_hub_names(model, _grouped(read_arrays(real_path(file))))
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
    folder: Path,
    config: Mapping[str, Any],
    weights_file: str,
    tensors: dict[str, mx.array],
    chat_template: str | None,
) -> None:
    """Writes all that is given. Each file appears only when it is complete."""
    needed = sum(array.nbytes for array in tensors.values())
    with writing("adapter", folder):
        with new_file(folder / weights_file, needed) as file:
            mx.save_safetensors(str(file), tensors, {"format": "mlx"})
        with new_file(folder / ADAPTER_CONFIG_FILE) as file:
            file.write_text(json_text(config, indent=4, sort_keys=True) + "\n", encoding="utf-8")
        if chat_template is not None:
            with new_file(folder / TEMPLATE_FILE) as file:
                file.write_text(chat_template, encoding="utf-8")


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
            f"[adapter] 'lora_parameters' must be an object but got {given!r:.80}. {_HINT}"
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
                f"{_HINT}"
            )
        groups.setdefault(layer, {})[part] = array
    return groups


def _check_tensors(folder: Path, adapter: Adapter) -> None:
    wanted = set(ADAPTER_PARAMETERS if adapter.kind == "dora" else ADAPTER_PARAMETERS[:2])
    if not adapter.tensors:
        raise CheckpointError(
            f"[adapter] '{folder}' must hold an adapter but has no tensors. {_HINT}"
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
                f"one rank but got {shapes}. {_HINT}"
            )
    _check_finite(adapter.tensors)


def _check_finite(tensors: Mapping[str, Mapping[str, mx.array]]) -> None:
    for layer, parts in tensors.items():
        if not all(mx.isfinite(array).all().item() for array in parts.values()):
            raise CheckpointError(
                f"[adapter] layer {layer!r:.100} must be finite but holds NaN or infinity. {_HINT}"
            )

"""Chooses what a fine-tuning run trains: adapters, or the weights of the layers themselves."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

from ..errors import TrainingError
from ..hub.names import layer_numbers, weight_names
from ..layers.lora import AdapterKind, adapted_layers, add_adapters, can_adapt
from ..layers.matrix import matrices, matrix_of, parameters
from ..models import Decoder


def adapt_layers(
    model: Decoder,
    *,
    kind: AdapterKind = "lora",
    num_layers: int = -1,
    keys: Sequence[str] | None = None,
    rank: int = 8,
    scale: float = 20.0,
    dropout: float = 0.0,
) -> list[str]:
    """Freezes a model and adds new adapters to some of its layers.

    Args:
        model: The model, which is changed in place.
        kind: `"lora"` or `"dora"`.
        num_layers: Number of layers that take part, counted from the last; -1 takes all.
        keys: Patterns (`fnmatch`) of names on the Hub, within a layer or in the whole model; `None`
            takes all linear layers of the blocks.
        rank, scale, dropout: As for `LoRALinear`.

    Returns:
        The Hub's names of the layers with adapters.

    Raises:
        TrainingError: A pattern matches nothing, no layer can have an adapter, or some have one.
    """
    candidates = [f"{name}.weight" for name, m in model.named_modules() if can_adapt(m)]
    chosen = _chosen(model, num_layers, keys, candidates)
    add_adapters(
        model,
        lambda name, _: f"{name}.weight" in chosen,
        kind=kind,
        rank=rank,
        scale=scale,
        dropout=dropout,
    )
    return sorted(chosen.values())


def unfreeze_layers(
    model: Decoder, *, num_layers: int = -1, keys: Sequence[str] | None = None
) -> list[str]:
    """Freezes a model except for the float weights of some of its layers, which become float32.

    Args:
        model: The model, which is changed in place.
        num_layers: As for `adapt_layers`.
        keys: As for `adapt_layers`.

    Returns:
        The Hub's names of the parameters that are not frozen.

    Raises:
        TrainingError: A pattern matches nothing, nothing would be trained, or a layer has no float
            weights.
    """
    modules = dict(model.named_modules())
    chosen = _chosen(model, num_layers, keys, list(parameters(model)))
    model.freeze()
    for name, hub_name in chosen.items():
        path, _, key = name.rpartition(".")
        matrix = matrix_of(modules[path])
        if matrix is not None and matrix.kept:
            raise TrainingError(
                f"[lora] '{hub_name}' must have float weights for full fine-tuning but is packed. Use a "
                "checkpoint with float master weights, or train an adapter."
            )
        modules[path].unfreeze(recurse=False, keys=[key])
        # 16 bits lose updates that are much smaller than the weights
        modules[path][key] = modules[path][key].astype(mx.float32)
    return sorted(chosen.values())


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of trained parameters and of all parameters. Each packed code counts as one."""
    trained, total = (
        tree_reduce(lambda count, array: count + array.size, tree, 0)
        for tree in (model.trainable_parameters(), model.parameters())
    )
    for matrix in matrices(model).values():
        if matrix.is_packed:
            total += matrix.output_dims * matrix.input_dims - matrix.layer.weight.size
    return trained, total


def _chosen(
    model: Decoder, num_layers: int, keys: Sequence[str] | None, candidates: Sequence[str]
) -> dict[str, str]:
    """Maps the names of the chosen parameters to their Hub names, without `.weight`."""
    if adapted_layers(model):
        raise TrainingError(
            "[lora] 'model' must have no adapter yet but has one. Merge it first with 'mmfree fuse', or "
            "train on its base model, beginning with its file as 'resume_adapter_file'."
        )
    names = weight_names(model.config)
    numbers = layer_numbers(model, names)
    first = 0 if num_layers == -1 else max(0, len(numbers) - num_layers)
    known: set[str] = set()
    used: set[str] = set()
    chosen = {}
    for name in candidates:
        hub_name = names.to_disk(name).removesuffix(".weight")
        place = names.in_layer(hub_name)
        label = hub_name if place is None else place[1]
        known.add(label)
        fitting = [key for key in keys or () if any(fnmatchcase(n, key) for n in (label, hub_name))]
        used.update(fitting)
        is_late = place is None or numbers[place[0]] >= first
        if is_late and (fitting or (keys is None and place is not None)):
            chosen[name] = hub_name
    if unused := [key for key in keys or () if key not in used]:
        raise TrainingError(
            "[lora] 'keys' must name layers that can be trained but got "
            f"{', '.join(map(repr, unused))}. The model has {', '.join(sorted(known))}."
        )
    if not chosen:
        raise TrainingError(
            "[lora] 'keys' must name at least one layer that can be trained but nothing would be "
            f"trained. The model has {', '.join(sorted(known)) or 'no such layer'}."
        )
    return chosen

"""Adapters, and how they are put on models."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...errors import CheckpointError
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
from ...models import Decoder
from ...models.parts.architecture import WeightNames, architecture_of, weight_names

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
        weights: Whole tensors that the folder holds too, by their names on the Hub. They must be the
            model's.
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
    return attach(frozen_copy(model), adapter)


def frozen_copy(model: Decoder) -> Decoder:
    """The model as it is, beside the model itself, with which it shares the weights."""
    arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shared = {id(array): array for _, array in arrays}
    return deepcopy(model, shared)


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


def by_hub_names(
    model: Decoder, tensors: Mapping[str, Mapping[str, mx.array]]
) -> dict[str, Mapping[str, mx.array]]:
    """The tensors by layer, where another program has the model as a part of a larger one."""
    names, newer_name = weight_names(model.config), architecture_of(model.config).newer_name
    return {
        name
        if newer_name is None or names.module_to_memory(name)
        else newer_name(name, tensors): parts
        for name, parts in tensors.items()
    }


def with_tied_head(
    model: Decoder, tensors: Mapping[str, Mapping[str, mx.array]]
) -> dict[str, Mapping[str, mx.array]]:
    """The tensors by layer, with the tensors of a head that changes because it is the embedding.

    PEFT has an adapter for each of the two. The product of the one is the other's, transposed.
    """
    names = weight_names(model.config)
    layers = dict(tensors)
    if _is_tied(model, names) and (name := names.module_to_disk(_EMBEDDING)) in layers:
        layers[names.module_to_disk(_HEAD)] = _transposed(layers[name])
    return layers


def _without_tied_head(
    model: Decoder, names: WeightNames, adapter: Adapter
) -> Mapping[str, Mapping[str, mx.array]]:
    """The tensors by layer, without the tensors of a head that is the embedding.

    Raises:
        CheckpointError: The adapter changes one of the two alone, or each of them otherwise.
    """
    layers = by_hub_names(model, adapter.tensors)
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
    """Returns whether the embedding is the head too, where others of the architecture have a head."""
    reads_text = model.pipeline != "image-classification"
    return reads_text and _HEAD not in model and names.has_module(_HEAD)


def _transposed(parts: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The low-rank product of an embedding, `(V, rank)` and `(rank, D)`, as a head's, or back."""
    return {"lora_a": parts["lora_b"].T, "lora_b": parts["lora_a"].T}


def _are_equal(a: Mapping[str, mx.array], b: Mapping[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(mx.array_equal(a[part], b[part]) for part in a)


def _check_weights(
    model: Decoder, names: WeightNames, weights: tuple[tuple[str, mx.array], ...]
) -> None:
    """Refuses whole tensors that are not the model's."""
    modules, arrays = matrices(model), parameters(model) if weights else {}
    for hub_name, array in weights:
        path, _, key = (names.to_memory(hub_name) or "").rpartition(".")
        if path == _HEAD and _is_tied(model, names):
            path = _EMBEDDING
        own = arrays.get(f"{path}.{key}")
        is_same = own is not None and (
            array.shape == (modules[path].output_dims, modules[path].input_dims)
            and modules[path].is_made_of(array)
            if key == "weight" and path in modules
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

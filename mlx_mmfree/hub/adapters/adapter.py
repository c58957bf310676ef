"""Puts adapters on models and takes them from models."""

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
from ...models import Decoder
from ..checkpoint.names import weight_names


@dataclass(frozen=True)
class Adapter:
    """An adapter apart from its model.

    Attributes:
        kind: `"lora"` or `"dora"`.
        scale: The factor of the low-rank product.
        dropout: The dropout of its input while training.
        tensors: For each adapted layer, by its name on the Hub: `lora_a` `(D, rank)`, `lora_b`
            `(rank, N)` and, for DoRA, `m` `(N,)`.
    """

    kind: AdapterKind
    scale: float
    dropout: float
    tensors: Mapping[str, Mapping[str, mx.array]]


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
    modules = dict(model.named_modules())
    adapted: dict[str, nn.Module] = {}
    for hub_name, parts in adapter.tensors.items():
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

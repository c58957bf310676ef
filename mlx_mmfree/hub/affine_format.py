"""MLX's affine form: ternary matrices in 2 bits, embeddings and heads in 4, 6 or 8.

A module `X` holds `X.weight`, `uint32`, at 2 bits in the layout of `ops.ternary`, and `X.scales` and
`X.biases`, one float each for a group of inputs: the weight is `code * scale + bias`. With codes
below 3 and `bias = -scale` it is ternary, with a scale for each group, as Ternary Bonsai stores its
linears and its embedding. Activations stay floats. `config.json` describes it under `quantization`,
with an entry of its own for each module that differs.
"""

from collections.abc import Collection, Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import CheckpointError, UnsupportedModelError
from ..models import Decoder
from ..ops.ternary import CODES_PER_WORD, packed_width
from .checkpoint import Checkpoint
from .names import WeightNames

METHOD = "affine"
BITS = 2
EMBEDDING_BITS = (4, 6, 8)
GROUP_SIZES = (32, 64, 128)
KEYS = ("weight", "scales", "biases")
"""Names of the tensors of a module."""

QuantizedModule = nn.QuantizedLinear | nn.QuantizedEmbedding

_FORM_KEYS = {"group_size", "bits", "mode"}


def form(group_size: int, bits: int = BITS) -> dict[str, Any]:
    """One form, as `config.json` describes it."""
    return {"group_size": group_size, "bits": bits, "mode": METHOD}


def group_size_of(input_dims: int) -> int:
    """The largest group that divides a row after it was padded to a multiple of 32."""
    padded = packed_width(input_dims) * CODES_PER_WORD
    return next(size for size in reversed(GROUP_SIZES) if padded % size == 0)


def describe(modules: Mapping[str, QuantizedModule]) -> dict[str, Any]:
    """The value of `quantization` for a model with such modules, by their names on disk."""
    forms = {name: form(m.group_size, m.bits) for name, m in modules.items()}
    ternary = [value for value in forms.values() if value["bits"] == BITS]
    default = max(ternary, key=ternary.count, default=form(GROUP_SIZES[-1]))
    return {**default, **{name: value for name, value in forms.items() if value != default}}


def check_form(described: Any) -> None:
    """Refuses other widths, groups and modes.

    Raises:
        UnsupportedModelError: The form is not read.
    """
    is_read = isinstance(described, Mapping) and _is_form(
        {key: described[key] for key in described if key in _FORM_KEYS}, (BITS,)
    )
    if not is_read or not all(
        _is_form(value, (BITS, *EMBEDDING_BITS))
        for key, value in described.items()
        if key not in _FORM_KEYS
    ):
        groups = ", ".join(map(str, GROUP_SIZES))
        raise UnsupportedModelError(
            "[config.json] 'quantization' must be affine with 2 bits and a group size of "
            f"{groups}, with 2, 4, 6 or 8 bits for single modules, but got {described!r:.200}."
        )


def _is_form(value: Any, bits: Collection[int]) -> bool:
    return (
        isinstance(value, Mapping)
        and not set(value) - _FORM_KEYS
        and value.get("bits") in bits
        and value.get("group_size") in GROUP_SIZES
        and value.get("mode", METHOD) == METHOD
    )


def quantize_modules(
    model: Decoder, names: WeightNames, checkpoint: Checkpoint, described: Mapping[str, Any]
) -> None:
    """Replaces the linears and the embedding that the checkpoint stores in this form.

    Args:
        model: A model in its training form.
        names: Names on disk and in memory.
        checkpoint: The checkpoint.
        described: The value of `quantization`, checked.
    """
    replaced: list[tuple[str, QuantizedModule]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        name = names.to_disk(path)
        if f"{name}.scales" not in checkpoint.tensors:
            continue
        own = described.get(name, described)
        group_size, bits = own["group_size"], own["bits"]
        input_dims = module.weight.shape[1]
        if input_dims % group_size:
            raise CheckpointError(
                f"[config.json] 'group_size' must divide the {input_dims} inputs of {name!r} but "
                f"got {group_size}."
            )
        replaced.append((path, quantized_module(module, group_size, bits)))
    model.update_modules(tree_unflatten(replaced))


def quantized_module(
    module: nn.Linear | nn.Embedding, group_size: int, bits: int
) -> QuantizedModule:
    """A module of the same sizes in this form, without its weights."""
    output_dims, input_dims = module.weight.shape
    if isinstance(module, nn.Embedding):
        return nn.QuantizedEmbedding(output_dims, input_dims, group_size=group_size, bits=bits)
    return nn.QuantizedLinear(
        input_dims, output_dims, "bias" in module, group_size=group_size, bits=bits
    )

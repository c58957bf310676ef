"""MLX's affine 2-bit form, in which Ternary Bonsai stores its linears and its embedding.

A module `X` holds `X.weight`, `uint32` in the layout of `ops.ternary`, and `X.scales` and
`X.biases`, one float each for a group of inputs: the weight is `code * scale + bias`. With codes
below 3 and `bias = -scale` it is ternary, with a scale for each group. Activations stay floats.
`config.json` describes it under `quantization`.
"""

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..errors import CheckpointError, UnsupportedModelError
from ..models import Decoder
from .checkpoint import Checkpoint
from .names import WeightNames

METHOD = "affine"
BITS = 2
GROUP_SIZES = (32, 64, 128)

QuantizedModule = nn.QuantizedLinear | nn.QuantizedEmbedding


def describe(module: QuantizedModule) -> dict[str, Any]:
    """The value of `quantization` for a model with such modules."""
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def check_form(described: Any) -> None:
    """Refuses other widths, groups and modes, and settings of single modules.

    Raises:
        UnsupportedModelError: The form is not read.
    """
    known = {"group_size", "bits", "mode"}
    if (
        not isinstance(described, Mapping)
        or set(described) - known
        or described.get("bits") != BITS
        or described.get("group_size") not in GROUP_SIZES
        or described.get("mode", METHOD) != METHOD
    ):
        groups = ", ".join(map(str, GROUP_SIZES))
        raise UnsupportedModelError(
            f"[config.json] 'quantization' must be affine with 2 bits and a group size of {groups} "
            f"but got {described!r:.200}."
        )


def quantize_modules(
    model: Decoder, names: WeightNames, checkpoint: Checkpoint, group_size: int
) -> None:
    """Replaces the linears and the embedding that the checkpoint stores in this form."""
    replaced: list[tuple[str, QuantizedModule]] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        if names.to_disk(f"{path}.scales") not in checkpoint.tensors:
            continue
        output_dims, input_dims = module.weight.shape
        if input_dims % group_size:
            raise CheckpointError(
                f"[config.json] 'group_size' must divide the {input_dims} inputs of "
                f"{names.to_disk(path)!r} but got {group_size}."
            )
        form: dict[str, Any] = {"group_size": group_size, "bits": BITS}
        if isinstance(module, nn.Embedding):
            replaced.append((path, nn.QuantizedEmbedding(output_dims, input_dims, **form)))
        else:
            has_bias = "bias" in module
            made = nn.QuantizedLinear(input_dims, output_dims, has_bias, **form)
            replaced.append((path, made))
    model.update_modules(tree_unflatten(replaced))

"""This library's packed form of a checkpoint on disk.

Names and `config.json` are those of the architecture on the Hub, with two differences.

- Each ternary linear `X` has `X.weight`, `uint32` in the layout of `ops.ternary`, and `X.weight_scale`,
  float32 of shape `(1,)`. In that layout a word holds 16 neighbouring inputs, the first in the lowest
  bits, `code = trit + 1`, and rows are padded to a multiple of 32 inputs with code 1. The weight is
  `trit * weight_scale`. If `linear_class` is `linear`, activations stay floats. Then `weight_scale` may
  have one number for each row, and the weight is also multiplied by `X.input_scale`, float32, which has
  one number for each column.
- `config.json` has the `quantization_config` of `describe_packing`.

mlx-lm can read the folders that `convert` writes. In these, `X.scales` and `X.biases` repeat the scale
in MLX's affine form, rounded to the dtype of the model. `config.json` has `quantization` too, and the
exact scales are in a file of their own, which mlx-lm does not read. With `trits_per_byte`, there are no
such copies: the model's Python file makes them.

Dense weights whose stored values are already ternary are packed in this form without loss. TriLM stores
`trit * scale`. Training split its matrices into blocks of rows or of columns, each with a scale of its
own. The scales are read from the values, and nothing is rounded. Ternary matrices in MLX's affine 2-bit
form are found in the same way, by their codes and scales. Where each group of 128, 64 or 32 inputs has a
scale of its own, as in BitCPM, floats become that affine form.
"""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ....layers import PackedLinear
from ....layers.matrix import Matrix
from ....ops import pack_ternary, packed_width
from ....ops.float_dtypes import FLOATS
from ....ops.host_blocks import has_valid_codes
from ..weight_form import Place, StoredMatrix, StoredTensor, WeightForm
from . import affine

OWN = {"quant_method": "mmfree", "format_version": 1, "bits": 2}

_PROBED_ROWS = 2


def describe_packing(
    described: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] = OWN,
    *,
    is_dense: bool = False,
) -> dict[str, Any]:
    """The value of `quantization_config`.

    Args:
        described: The value for the checkpoint with float master weights. What it says about the
            mathematics of the linears stays.
        own: The entries that tell this form, or another with its `quant_method`.
        is_dense: Whether the linears are those of a dense model, whose activations stay floats.
    """
    stored = {"linear_class", "quantization_mode", "trits_per_byte"}
    kept = {key: value for key, value in (described or {}).items() if key not in stored}
    if is_dense:
        kept["linear_class"] = "linear"
    return {**kept, **own}


def open_packed(places: Mapping[str, Place]) -> dict[str, StoredMatrix]:
    """The matrices that are stored with a scale, by their paths."""
    found = {}
    for path, (matrix, _, tensors, _) in places.items():
        if "weight_scale" not in tensors:
            continue
        weight, scale = tensors.get("weight"), tensors["weight_scale"]
        if matrix.is_ternary:
            # MLX's affine form repeats the scale, rounded, for each group of inputs
            found[path] = StoredMatrix(matrix.packed_room(), copies=("scales", "biases"))
        elif matrix.is_plain and not matrix.is_embedding and weight and weight.dtype == mx.uint32:
            layer = PackedLinear(
                matrix.input_dims,
                matrix.output_dims,
                "bias" in matrix.layer,
                has_row_scales=scale.shape != (1,),
                has_column_scales="input_scale" in tensors,
            )
            own = scale.name.endswith(".weight_scale")
            has_axes = not own and math.prod(scale.shape) == matrix.output_dims
            found[path] = StoredMatrix(layer, _of_rows(layer, scale.shape) if has_axes else {})
    return found


def _of_rows(layer: PackedLinear, rows: tuple[int, ...]) -> dict[str, StoredTensor]:
    """How another writer stores codes and scales of rows: with an axis for experts, in any float."""
    width = layer.weight.shape[1]
    return {
        "weight": StoredTensor(((*rows, width),), (mx.uint32,), lambda x: x.reshape(-1, width)),
        "scale": StoredTensor((rows,), FLOATS, lambda x: x.astype(mx.float32).reshape(-1)),
    }


def _describe(held: Mapping[str, Matrix], config: Mapping[str, Any]) -> dict[str, Any]:
    packed = [matrix for matrix in held.values() if matrix.holds_trits]
    if not packed:
        return {}
    is_dense = not any(matrix.is_ternary for matrix in packed)
    described = config.get("quantization_config")
    return {"quantization_config": describe_packing(described, is_dense=is_dense)}


def _simplify(matrix: Matrix) -> nn.Module | None:
    if matrix.is_embedding or matrix.is_ternary:
        return None
    if matrix.is_plain:
        return pack_ternary_values(matrix.layer)
    return _from_codes(matrix) if matrix.holds_codes else None


def pack_ternary_values(linear: nn.Module) -> nn.Module | None:
    """The form of 2 bits of a dense linear that loses nothing; `None` if its weight is not ternary."""
    weight = linear.weight.astype(mx.float32)
    sizes = mx.abs(weight)
    # a few rows are enough to tell that most dense matrices are not ternary
    if not _is_ternary(sizes[:_PROBED_ROWS], 1) and not _is_ternary(sizes[:_PROBED_ROWS], 0):
        return _in_groups(linear, sizes)
    scales = mx.max(sizes)
    if not scales.item():
        return None
    if not _has_one_size(sizes, scales):
        axis = 1 if _is_ternary(sizes, 1) else 0
        if axis == 0 and not _is_ternary(sizes, 0):
            return _in_groups(linear, sizes)
        largest = mx.max(sizes, axis=axis)
        # rows and columns of zeros may have any scale
        scales = mx.where(largest == 0, scales, largest)
        return _packed(linear, weight.shape[1], pack_ternary(mx.sign(weight)), scales, axis)
    return _packed(linear, weight.shape[1], pack_ternary(mx.sign(weight)), scales.reshape(1), 1)


def _in_groups(linear: nn.Module, sizes: mx.array) -> nn.Module | None:
    """The affine form of floats that have one size in each group of inputs; `None` if they have not."""
    weight, (output_dims, input_dims) = linear.weight, sizes.shape
    for group_size in reversed(affine.GROUP_SIZES):
        if input_dims % group_size:
            continue
        groups = mx.unflatten(sizes, 1, (-1, group_size))
        if not _is_ternary(groups[:_PROBED_ROWS], 2) or not _is_ternary(groups, 2):
            continue
        layer = nn.QuantizedLinear(input_dims, output_dims, "bias" in linear, group_size, 2)
        scales = mx.max(groups, axis=2)
        # a group of zeros may have any scale
        layer.scales = mx.where(scales == 0, mx.max(scales), scales).astype(weight.dtype)
        layer.weight, layer.biases = pack_ternary(mx.sign(weight)), -layer.scales
        if "bias" in linear:
            layer.bias = linear.bias
        return layer
    return None


def scales_of_blocks(layer: nn.Module, size: int) -> mx.array | None:
    """The scale of each block of inputs of a linear that `pack_ternary_values` made.

    Args:
        layer: A linear with N outputs and D inputs.
        size: The inputs of a block.

    Returns:
        float32 `(N, D / size)`; `None` if a block has several scales, or the last one fewer inputs.
    """
    if getattr(layer, "holds_trits", False):
        scales, own = layer.scale[:, None], layer.input_dims
        if "input_scale" in layer:
            scales, own = scales * layer.input_scale, 1
        scales = mx.broadcast_to(scales, (layer.output_dims, scales.shape[1]))
        input_dims = layer.input_dims
    else:
        scales, own = layer.scales.astype(mx.float32), layer.group_size
        input_dims = scales.shape[1] * own
    if input_dims % size:
        return None
    if own >= size:
        return mx.repeat(scales, own // size, axis=1) if own % size == 0 else None
    blocks = mx.unflatten(scales, 1, (-1, size // own))
    return blocks[..., 0] if mx.all(blocks == blocks[..., :1]).item() else None


def _from_codes(matrix: Matrix) -> PackedLinear | None:
    module, input_dims = matrix.layer, matrix.input_dims
    if module.bits != 2 or module.biases is None:
        return None
    fits = module.weight.shape[1] == packed_width(input_dims)
    scales = module.scales.astype(mx.float32)
    is_negated = mx.array_equal(-scales, module.biases.astype(mx.float32))
    is_ternary = mx.logical_and(is_negated, mx.all(scales > 0))
    if not fits or not is_ternary.item() or not has_valid_codes(module.weight, input_dims):
        return None
    if mx.all(scales == scales[:, :1]).item():
        is_single = mx.all(scales == scales[0, 0]).item()
        scales = scales[0, :1] if is_single else scales[:, 0]
        return _packed(module, input_dims, module.weight, scales, 1)
    if mx.all(scales == scales[:1]).item():
        scales = mx.repeat(scales[0], module.group_size)
        return _packed(module, input_dims, module.weight, scales, 0)
    return None


def _has_one_size(sizes: mx.array, scale: mx.array) -> bool:
    return bool(mx.all((sizes == 0) | (sizes == scale)).item())


def _is_ternary(sizes: mx.array, axis: int) -> bool:
    """Whether the sizes along an axis are all zero or one other number."""
    return _has_one_size(sizes, mx.max(sizes, axis=axis, keepdims=True))


def _packed(
    linear: nn.Module, input_dims: int, weight: mx.array, scales: mx.array, axis: int
) -> PackedLinear:
    """A packed linear with scales of the whole matrix, its rows (axis 1) or its columns (axis 0)."""
    output_dims = weight.shape[0]
    is_by_column = axis == 0
    packed = PackedLinear(input_dims, output_dims, has_column_scales=is_by_column)
    packed.weight = weight
    if is_by_column:
        packed.input_scale = scales
    else:
        packed.scale = scales
    if "bias" in linear:
        packed.bias = linear.bias
    return packed


FORM = WeightForm(
    name="mmfree",
    open=open_packed,
    own=OWN,
    is_usual=True,
    simplify=_simplify,
    describe=_describe,
)

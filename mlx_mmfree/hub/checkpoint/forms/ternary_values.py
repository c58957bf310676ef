"""Finds weights whose stored values are already ternary, and packs them without loss.

TriLM stores `trit * scale`. Training split its matrices into blocks of rows or of columns, each with a
scale of its own. The scales are read from the values, and nothing is rounded. Ternary matrices in MLX's
affine 2-bit form are found in the same way, by their codes and scales.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ....layers.bit_linear import PackedLinear
from ....layers.matrix import Matrix, matrices
from ....ops import pack_ternary, packed_width
from .packed_format import has_valid_codes

_PROBED_ROWS = 2


def pack_ternary_values(linear: nn.Linear) -> PackedLinear | None:
    """The packed form of a dense linear; `None` if its weight is not ternary."""
    weight = linear.weight.astype(mx.float32)
    sizes = mx.abs(weight)
    # a few rows are enough to tell that most dense matrices are not ternary
    if not _is_ternary(sizes[:_PROBED_ROWS], 1) and not _is_ternary(sizes[:_PROBED_ROWS], 0):
        return None
    scales = mx.max(sizes)
    if not scales.item():
        return None
    if not _has_one_size(sizes, scales):
        axis = 1 if _is_ternary(sizes, 1) else 0
        if axis == 0 and not _is_ternary(sizes, 0):
            return None
        largest = mx.max(sizes, axis=axis)
        # rows and columns of zeros may have any scale
        scales = mx.where(largest == 0, scales, largest)
        return _packed(linear, weight.shape[1], pack_ternary(mx.sign(weight)), scales, axis)
    return _packed(linear, weight.shape[1], pack_ternary(mx.sign(weight)), scales.reshape(1), 1)


def simplify_affine(model: nn.Module) -> None:
    """Packs the 2-bit linears that are ternary with one scale for the matrix, for each row or column."""
    replaced = []
    for path, matrix in matrices(model).items():
        if matrix.storage == "codes" and not matrix.is_embedding:
            packed = _from_affine(matrix)
            if packed is not None:
                mx.eval(packed.parameters())
                replaced.append((path, packed))
    model.update_modules(tree_unflatten(replaced))


def _from_affine(matrix: Matrix) -> PackedLinear | None:
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

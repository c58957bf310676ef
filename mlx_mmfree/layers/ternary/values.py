"""Finds linears of dense models whose values are ternary, and holds them in 2 bits without loss.

The scales are read from the values: one for the matrix, for each row, for each column, or for each group
of inputs. Nothing is rounded.
"""

import mlx.core as mx
import mlx.nn as nn

from ...ops import pack_ternary, packed_width
from ...ops.dense_matmul import GROUP_SIZES
from ...ops.host_blocks import has_valid_codes
from ..dense import QuantizedLinear
from ..linear import PackedLinear
from ..matrix import Matrix

TERNARY_BITS = 2
"""The bits of codes that stand for trits."""

_PROBED_ROWS = 2


def with_fewer_bits(matrix: Matrix) -> nn.Module | None:
    """A layer that computes the same as a linear of floats or codes; `None` if there is none."""
    if matrix.is_embedding or matrix.is_ternary:
        return None
    if matrix.is_plain:
        return pack_ternary_values(matrix.layer)
    return _from_codes(matrix) if matrix.holds_codes else None


def pack_ternary_values(linear: nn.Module) -> nn.Module | None:
    """The format of 2 bits of a dense linear that loses nothing; `None` if its weight is not ternary."""
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
    """The affine format of floats of one magnitude in each group of inputs; `None` for other floats."""
    weight, (output_dims, input_dims) = linear.weight, sizes.shape
    for group_size in reversed(GROUP_SIZES):
        if input_dims % group_size:
            continue
        groups = mx.unflatten(sizes, 1, (-1, group_size))
        if not _is_ternary(groups[:_PROBED_ROWS], 2) or not _is_ternary(groups, 2):
            continue
        layer = QuantizedLinear(input_dims, output_dims, "bias" in linear, group_size, TERNARY_BITS)
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
    if module.bits != TERNARY_BITS or module.biases is None:
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
    """Returns whether the sizes along an axis are all zero or one other number."""
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

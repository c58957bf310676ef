"""Product of each row of activations with one of several matrices of codes, as experts have.

On Metal, codes of 2 bits have a kernel, see `backend.metal_gathered`. Other codes, and many rows for
each matrix, are multiplied by MLX's product.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx

from .backend import metal_gathered, self_check
from .backend.dispatch import FLOATS, Backend, Example, Operation
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import keeps_half_denormals
from .dense_matmul import AffineFormat
from .gather_ternary_matmul import check_gathered, gathered_product


def gather_affine_matmul(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    *,
    starts: mx.array | None = None,
) -> mx.array:
    r"""Multiplies each row by the matrix of codes that it names.

    .. math::
        y_r = x_r\,W_{i_r}^\top

    where a weight is :math:`s\,c + b` of its code :math:`c`, with a scale and a bias for each group of
    inputs. Sums are float32. A GPU computes codes of other than 2 bits, and many rows for each matrix,
    with the precision of the scales' dtype. The gradient is by `x` alone.

    Source: mixtures of experts (Shazeer et al., arXiv 1701.06538), with MLX's affine format.

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Codes of `E` matrices as `mx.quantize` packs them, `uint32` of shape
            `(E, N, D * bits / 32)`.
        format: What turns codes into weights, with scales and biases `(E, N, D / group_size)`.
        indices: The matrix :math:`i_r` of each row, integers `(...)` in `[0, E)`. Results of rows with
            others are undefined.
        starts: Of rows that are sorted by their matrices, `x` being `(rows, D)`: where the rows of each
            matrix begin, and their number, integers `(E + 1,)`. They make a GPU read a matrix once.

    Returns:
        float32 of shape `(..., N)`.

    Raises:
        ValueError: Shapes do not agree, a dtype is wrong, or there is not one index for each row.

    Example:
        >>> codes, *rest = (x.reshape(2, 3, -1) for x in mx.quantize(mx.ones((6, 64)), 32, 2))
        >>> format = AffineFormat(*rest, group_size=32, bits=2)
        >>> gather_affine_matmul(mx.ones((1, 64)), codes, format, mx.array([1])).tolist()
        [[64.0, 64.0, 64.0]]
    """
    check_gathered(
        "gather_affine_matmul", x, weight, lambda dims: dims * format.bits / 32, indices, starts
    )
    scales, biases, group_size, bits = format
    groups = (*weight.shape[:2], weight.shape[2] * 32 // bits // group_size)
    if scales.shape != groups or biases.shape != groups:
        raise ValueError(
            f"[gather_affine_matmul] 'format' must have scales and biases of shape {groups} but got "
            f"{scales.shape} and {biases.shape}."
        )
    if x.size == 0 or weight.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[1]))
    y: mx.array = _operation(x, weight, format, indices.astype(mx.uint32), starts)
    return y


def reference(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    starts: mx.array | None = None,
) -> mx.array:
    """The definition: the matrix of each row as float32, and one product."""
    scales, biases = (part[indices].astype(mx.float32) for part in format[:2])
    matrices = mx.dequantize(weight[indices], scales, biases, format.group_size, format.bits)
    return (x.astype(mx.float32)[..., None, :] @ matrices.swapaxes(-1, -2))[..., 0, :]


def chunked(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    starts: mx.array | None = None,
) -> mx.array:
    """MLX's product in float32."""
    is_few = indices.size < weight.shape[0]
    # the scales of all matrices would be most of what few rows read
    scales, biases = ((part[indices] if is_few else part).astype(mx.float32) for part in format[:2])
    format = format._replace(scales=scales, biases=biases)
    if not is_few:
        return gathered_product(x, weight, format, indices)
    rows = x.astype(mx.float32)[..., None, :]
    return mx.quantized_matmul(
        rows, weight[indices], scales, biases, group_size=format.group_size, bits=format.bits
    )[..., 0, :]


def _suits(x: mx.array, weight: mx.array, starts: mx.array | None, bits: int) -> bool:
    return bits == 2 and metal_gathered.suits(x, weight, starts)


def unsupported(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    starts: mx.array | None = None,
) -> str | None:
    if x.dtype not in FLOATS:
        return f"it takes float32, float16 or bfloat16 activations, not {x.dtype}"
    if not _suits(x, weight, starts, format.bits):
        return None
    dtypes = {"x": x.dtype, "scales": format.scales.dtype}
    return self_check.kernel_fault(
        "gather_affine_matmul",
        _with_gradient(format.group_size, format.bits),
        _definition(format.group_size, format.bits),
        lambda: _check_inputs(x, weight, format.group_size, starts is not None, **dtypes),
        **metal_gathered.variant(x, weight, starts),
        are_halves=keeps_half_denormals(),
        group_size=format.group_size,
        **dtypes,
    )


def _check_inputs(
    like: mx.array,
    weight: mx.array,
    group_size: int,
    is_sorted: bool,
    x: mx.Dtype,
    scales: mx.Dtype,
) -> list[mx.array]:
    # a SIMD group and a part of one, for matrices with two rows, three and none
    dims, rest = like.shape[-1], weight.shape[1] % metal_gathered.OUTPUTS
    outputs, words = 8 + (rest or 8), weight.shape[2]
    rows = (mx.arange(5 * dims) * 37 % 255 - 127).reshape(5, dims) / 64.0
    codes = mx.arange(3 * outputs * words, dtype=mx.uint32).reshape(3, outputs, words) * 2654435761
    factors = mx.arange(3 * outputs * (dims // group_size)).reshape(3, outputs, -1)
    given = [
        *(rows.astype(x), codes, (0.5 + factors % 7 / 8.0).astype(scales)),
        *((factors % 5 / -4.0).astype(scales), mx.array([0, 0, 1, 1, 1], mx.uint32)),
    ]
    return [*given, mx.array([0, 2, 5, 5])] if is_sorted else given


def _in_one_launch(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array,
    indices: mx.array,
    starts: mx.array | None = None,
) -> mx.array:
    return metal_gathered.multiply(x, weight, indices, starts, scales, biases)


def _definition(group_size: int, bits: int) -> Any:
    """`reference` of arrays alone, in the order of `_in_one_launch`."""

    def definition(
        x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *others: mx.array
    ) -> mx.array:
        return reference(x, weight, AffineFormat(scales, biases, group_size, bits), *others)

    return definition


def _with_gradient(group_size: int, bits: int) -> Any:
    def backward(
        inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
    ) -> tuple[mx.array | None, ...]:
        x, weight, scales, biases, indices, *_ = inputs
        format = AffineFormat(scales, biases, group_size, bits)
        d_x = gathered_product(cotangents[0], weight, format, indices, transpose=False)
        return d_x.astype(x.dtype), *(mx.zeros_like(part) for part in inputs[1:])

    return with_reference_gradient(_in_one_launch, _definition(group_size, bits), backward)


def metal(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    starts: mx.array | None = None,
) -> mx.array:
    scales, biases, group_size, bits = format
    if not _suits(x, weight, starts, bits):
        y = gathered_product(x, weight, format, indices, is_sorted=starts is not None)
        return y.astype(mx.float32)
    given = [x, weight, scales, biases, indices, *([] if starts is None else [starts])]
    y = _with_gradient(group_size, bits)(*given)
    return y


def _examples() -> Iterator[Example]:
    for (outputs, group_size), dtype in product(((8, 64), (9, 128)), FLOATS):
        codes = mx.zeros((2, outputs, 8), mx.uint32)
        scales = mx.zeros((2, outputs, 128 // group_size), dtype)
        x, indices = mx.zeros((2, 128), dtype), mx.zeros((2,), mx.uint32)
        for starts in (None, mx.array([0, 2, 2])):
            format = AffineFormat(scales, scales, group_size, 2)
            yield Example((x, codes, format, indices, starts))


_operation = Operation(
    "gather_affine_matmul",
    _examples,
    metal=Backend(metal, unsupported),
    chunked=chunked,
    reference=reference,
)

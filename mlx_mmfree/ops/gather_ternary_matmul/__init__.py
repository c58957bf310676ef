"""Product of each row of activations with one of several packed ternary matrices, as experts have."""

from collections.abc import Iterator
from itertools import product

import mlx.core as mx

from ..backend.cost import Call, Cost, Product, work
from ..backend.dispatch import Backend, Example, Operation, native_kernel
from ..float_dtypes import FLOATS
from ..ternary import packed_width
from .definition import chunked, reference
from .metal import metal, unsupported


def gather_ternary_matmul(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    r"""Multiplies each row by the packed ternary matrix that it names.

    .. math::
        y_r = x_r\,T_{i_r}^\top

    Of the matrices, a kernel reads only those that some row names. The gradient is that of `x`.

    Source: mixtures of experts (Shazeer et al., arXiv 1701.06538), with the matrices of BitNet b1.58 (Ma
    et al., arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Packed trits of `E` matrices, `uint32` of shape `(E, N, packed_width(D))`, see
            `ops.ternary`.
        indices: The matrix :math:`i_r` of each row, integers `(...)` in `[0, E)`. Results of rows with
            others are undefined.

    Returns:
        Sums as float32 of shape `(..., N)`.

    Raises:
        ValueError: The packed width does not belong to `D` inputs, a dtype is wrong, or there is not one
            index for each row.

    Example:
        >>> from mlx_mmfree.ops import pack_ternary
        >>> weight = mx.stack([pack_ternary(mx.eye(2)), pack_ternary(-mx.eye(2))])
        >>> gather_ternary_matmul(mx.array([[5.0, 7.0], [5.0, 7.0]]), weight, mx.array([0, 1])).tolist()
        [[5.0, 7.0], [-5.0, -7.0]]
    """
    if weight.dtype != mx.uint32 or weight.ndim != 3:
        raise ValueError(
            "[gather_ternary_matmul] 'weight' must be uint32 matrices (E, N, W) but got "
            f"{weight.dtype} with shape {weight.shape}."
        )
    if x.ndim < 1 or weight.shape[2] != packed_width(x.shape[-1]):
        raise ValueError(
            "[gather_ternary_matmul] 'weight' must have the words of the inputs of 'x' in a row but has "
            f"{weight.shape[2]} for shape {x.shape}."
        )
    if indices.shape != x.shape[:-1] or not mx.issubdtype(indices.dtype, mx.integer):
        raise ValueError(
            "[gather_ternary_matmul] 'indices' must have an integer for each row of 'x' but got "
            f"{indices.dtype} with shape {indices.shape} for shape {x.shape}."
        )
    if x.size == 0 or weight.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[1]))
    result: mx.array = _operation(x, weight, indices.astype(mx.uint32))
    return result


def native(x: mx.array, weight: mx.array, indices: mx.array) -> mx.array:
    """C++, in which the rows of a matrix share one product."""
    sums: mx.array = _kernel()(x.astype(mx.float32), weight, indices)
    return sums


def _cost(call: Call) -> Cost:
    """Each row reads a matrix, which is most where rows are fewer than matrices."""
    x, weight, indices = call.inputs
    experts, outputs, _ = weight.shape
    dims, read = x.shape[-1], min(indices.size, experts)
    is_transposed = call.options[0]
    inputs, outputs = (call.options[1], dims) if is_transposed else (dims, outputs)
    own = work(add=indices.size * inputs * outputs)
    found = Product(inputs, outputs, indices.size, 1, (1,), True, own)
    return Cost(own, (found,), {1: weight.nbytes // experts * read})


def _examples() -> Iterator[Example]:
    for rows, dims, dtype in product((1, 2), (32, 4, 33), FLOATS):
        weight = mx.zeros((2, 3, packed_width(dims)), mx.uint32)
        yield Example((mx.zeros((rows, dims), dtype), weight, mx.zeros((rows,), mx.uint32)))


_kernel = native_kernel("gather_ternary_matmul")
_operation = Operation(
    "gather_ternary_matmul",
    _examples,
    costs={"GatherTernaryMatmul": _cost},
    metal=Backend(metal, unsupported),
    native=native,
    chunked=chunked,
    reference=reference,
)

"""Product of each row of activations with one of several packed ternary matrices, as experts have.

On Metal, a kernel reads each matrix that is named once where rows are sorted by matrix, see
`backend.metal_gathered`. Many rows for each matrix are multiplied by MLX's product, to which packed
words are affine 2-bit matrices with scale 1 and bias -1.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import mlx.core as mx

from .backend import metal_gathered, self_check
from .backend.cost import Call, Cost, Product, work
from .backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel
from .backend.gradient import with_reference_gradient
from .backend.metal_functions import keeps_half_denormals
from .backend.self_check import packed_pattern
from .dense_matmul import AffineFormat
from .ternary import CODES_PER_WORD, packed_width, unpack_ternary
from .ternary_matmul.definition import GROUP_SIZES, ones


def gather_ternary_matmul(
    x: mx.array, weight: mx.array, indices: mx.array, *, starts: mx.array | None = None
) -> mx.array:
    r"""Multiplies each row by the packed ternary matrix that it names.

    .. math::
        y_r = x_r\,T_{i_r}^\top

    Of the matrices, a kernel reads only those that some row names. The gradient is by `x` alone.

    Source: mixtures of experts (Shazeer et al., arXiv 1701.06538), with the matrices of BitNet b1.58 (Ma
    et al., arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Packed trits of `E` matrices, `uint32` of shape `(E, N, packed_width(D))`, see
            `ops.ternary`.
        indices: The matrix :math:`i_r` of each row, integers `(...)` in `[0, E)`. Results of rows with
            others are undefined.
        starts: Of rows that are sorted by their matrices, `x` being `(rows, D)`: where the rows of each
            matrix begin, and their number, integers `(E + 1,)`. They make a GPU read a matrix once.

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
    check_gathered("gather_ternary_matmul", x, weight, packed_width, indices, starts)
    if x.size == 0 or weight.size == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[1]))
    result: mx.array = _operation(x, weight, indices.astype(mx.uint32), starts)
    return result


def check_gathered(
    caller: str,
    x: mx.array,
    weight: mx.array,
    width_of: Callable[[int], float],
    indices: mx.array,
    starts: mx.array | None,
) -> None:
    """Checks rows, the matrices that they may name, and where the rows of each matrix begin.

    Args:
        caller: The function, for messages.
        x, weight, indices, starts: Its arguments.
        width_of: The words of a row of a matrix for a number of inputs.

    Raises:
        ValueError: A shape or dtype does not fit, or rows that are sorted have several axes.
    """
    if weight.dtype != mx.uint32 or weight.ndim != 3:
        raise ValueError(
            f"[{caller}] 'weight' must be uint32 matrices (E, N, W) but got {weight.dtype} with shape "
            f"{weight.shape}."
        )
    if x.ndim < 1 or weight.shape[2] != width_of(x.shape[-1]):
        raise ValueError(
            f"[{caller}] 'weight' must have the words of the inputs of 'x' in a row but has "
            f"{weight.shape[2]} for shape {x.shape}."
        )
    if indices.shape != x.shape[:-1] or not mx.issubdtype(indices.dtype, mx.integer):
        raise ValueError(
            f"[{caller}] 'indices' must have an integer for each row of 'x' but got {indices.dtype} "
            f"with shape {indices.shape} for shape {x.shape}."
        )
    if starts is None:
        return
    count, is_whole = weight.shape[0], mx.issubdtype(starts.dtype, mx.integer)
    if starts.shape != (count + 1,) or not is_whole or x.ndim != 2:
        raise ValueError(
            f"[{caller}] 'starts' must be {count + 1} integers for rows (rows, D) but got "
            f"{starts.dtype} with shape {starts.shape} for shape {x.shape}."
        )


BLOCK_WEIGHTS = 2**22


def reference(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
    """The definition: unpack the matrix of each row, then one float32 product. Some rows at a time."""
    dims, (_, outputs, words) = x.shape[-1], weight.shape
    rows, named = x.reshape(-1, dims).astype(mx.float32), indices.reshape(-1)
    step = max(BLOCK_WEIGHTS // (outputs * dims), 1)
    parts = []
    for start in range(0, len(rows), step):
        chosen = weight[named[start : start + step]]
        trits = unpack_ternary(chosen.reshape(-1, words), dims).reshape(len(chosen), outputs, dims)
        parts.append((trits @ rows[start : start + step, :, None])[..., 0])
    return mx.concatenate(parts).reshape(*x.shape[:-1], outputs)


def gradients(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array | None, ...]:
    """The gradient of `x`."""
    x, weight, indices, *starts = inputs
    d_x = _product(cotangents[0], weight, indices, False, bool(starts))[..., : x.shape[-1]]
    return d_x, None, None, *(None for _ in starts)


def mlx_product(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
    """MLX's product, which reads the matrices that are named."""
    width = weight.shape[2] * CODES_PER_WORD
    padding = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    padded = mx.pad(x.astype(mx.float32), padding)
    return _product(padded, weight, indices, True, starts is not None)


def _product(
    x: mx.array, weight: mx.array, indices: mx.array, transpose: bool, is_sorted: bool
) -> mx.array:
    experts, outputs, words = weight.shape
    group_size = next(size for size in GROUP_SIZES if words * CODES_PER_WORD % size == 0)
    scales, biases = (
        array.reshape(experts, outputs, -1)
        for array in ones(experts * outputs, words * CODES_PER_WORD // group_size, mx.float32)
    )
    format = AffineFormat(scales, biases, group_size, bits=2)
    return gathered_product(x, weight, format, indices, transpose=transpose, is_sorted=is_sorted)


def gathered_product(
    x: mx.array,
    weight: mx.array,
    format: AffineFormat,
    indices: mx.array,
    *,
    transpose: bool = True,
    is_sorted: bool = False,
) -> mx.array:
    """MLX's product of rows with the matrices of codes that they name.

    It is computed in the dtype of the scales, of which none is copied.
    """
    scales, biases, group_size, bits = format
    y = mx.gather_qmm(
        x.astype(scales.dtype)[..., None, :],
        weight,
        scales,
        biases,
        rhs_indices=indices,
        transpose=transpose,
        group_size=group_size,
        bits=bits,
        sorted_indices=is_sorted,
    )
    return y[..., 0, :]


_of_mlx = with_reference_gradient(mlx_product, reference, gradients)


def chunked(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
    """MLX's own product, where the library's kernels cannot run."""
    y: mx.array = _of_mlx(x, weight, indices, *([] if starts is None else [starts]))
    return y


def unsupported(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> str | None:
    if x.dtype not in FLOATS:
        return f"it takes float32, float16 or bfloat16 activations, not {x.dtype}"
    if not metal_gathered.suits(x, weight, starts):
        return None
    return self_check.kernel_fault(
        "gather_ternary_matmul",
        _in_one_launch,
        reference,
        lambda: _check_inputs(x.shape[-1], weight.shape, x.dtype, starts is not None),
        **metal_gathered.variant(x, weight, starts),
        are_halves=keeps_half_denormals(),
        x=x.dtype,
    )


def _check_inputs(
    dims: int, shape: tuple[int, ...], dtype: mx.Dtype, is_sorted: bool
) -> tuple[mx.array, ...]:
    # a SIMD group and a part of one, for matrices with two rows, three and none
    outputs = 9 + shape[1] % metal_gathered.OUTPUTS if shape[1] % metal_gathered.OUTPUTS else 16
    x = (mx.arange(5 * dims) * 37 % 255 - 127).reshape(5, dims).astype(dtype)
    weight = packed_pattern(3 * outputs, packed_width(dims)).reshape(3, outputs, -1)
    indices = mx.array([0, 0, 1, 1, 1], mx.uint32)
    return (x, weight, indices, *([mx.array([0, 2, 5, 5])] if is_sorted else []))


def metal(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
    if not metal_gathered.suits(x, weight, starts):
        return chunked(x, weight, indices, starts)
    y: mx.array = _with_gradient(x, weight, indices, *([] if starts is None else [starts]))
    return y


def _in_one_launch(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
    return metal_gathered.multiply(x, weight, indices, starts)


_with_gradient = with_reference_gradient(_in_one_launch, reference, gradients)


def native(
    x: mx.array, weight: mx.array, indices: mx.array, starts: mx.array | None = None
) -> mx.array:
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
    for (outputs, dims), dtype in product(((8, 32), (3, 33)), FLOATS):
        weight = mx.zeros((2, outputs, packed_width(dims)), mx.uint32)
        x, indices = mx.zeros((2, dims), dtype), mx.zeros((2,), mx.uint32)
        for starts in (None, mx.array([0, 2, 2])):
            yield Example((x, weight, indices, starts))


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

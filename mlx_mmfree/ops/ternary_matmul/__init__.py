"""Product of activations and a packed ternary matrix, as in BitNet b1.58 (arXiv 2402.17764)."""

from collections.abc import Iterator
from itertools import product

import mlx.core as mx

from ..backend.cost import Call, Cost, Product, work
from ..backend.dispatch import FLOATS, Backend, Example, Operation, native_kernel
from ..backend.launch import EXAMPLE_ROWS, FEW_ROWS
from ..ternary import MOST_CODES, packed_width
from .definition import chunked, reference
from .metal import metal, unsupported


def ternary_matmul(x: mx.array, weight: mx.array, *, codes: bool = False) -> mx.array:
    r"""Multiplies by a packed ternary matrix.

    .. math::
        y = x\,T^\top

    With whole numbers for activations, such as the codes of `rms_norm_quantize`, every sum is an exact
    whole number, the same on every backend and for any number of rows, as long as `D <= 2 ** 24 / 128`.
    The caller multiplies the sums by the scale. The gradient is by `x` alone.

    Source: BitNet b1.58 (Ma et al., arXiv 2402.17764).

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Packed trits, `uint32` of shape `(N, packed_width(D))`, see `ops.ternary`.
        codes: Whether the caller vouches that `x` holds whole numbers in [-128, 127], so that a backend
            may compute with 8-bit integers. A row with a NaN gives NaN. Results for other values are
            undefined.

    Returns:
        Sums as float32 of shape `(..., N)`.

    Raises:
        ValueError: The packed width does not belong to `D` inputs, a dtype is wrong, or `D` is above
            `2 ** 22` with `codes`.

    Example:
        >>> weight = pack_ternary(mx.array([[-1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))
        >>> ternary_matmul(mx.array([[5.0, 7.0, 9.0]]), weight).tolist()
        [[4.0, 12.0]]
    """
    if x.ndim < 1:
        raise ValueError("[ternary_matmul] 'x' must have shape (..., D) but got a single number.")
    if weight.dtype != mx.uint32 or weight.ndim != 2:
        raise ValueError(
            f"[ternary_matmul] 'weight' must be a uint32 matrix but got {weight.dtype} with shape "
            f"{weight.shape}."
        )
    width = packed_width(x.shape[-1])
    if weight.shape[1] != width:
        raise ValueError(
            f"[ternary_matmul] 'weight' must have {width} words a row for "
            f"{x.shape[-1]} inputs but got {weight.shape[1]}."
        )
    if codes and x.shape[-1] > MOST_CODES:
        raise ValueError(
            f"[ternary_matmul] 'x' must have {MOST_CODES} codes a row at most but got {x.shape[-1]}."
        )
    if x.size == 0 or weight.shape[0] == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]))
    result: mx.array = _operation(x, weight, codes=codes)
    return result


def native(x: mx.array, weight: mx.array, *, codes: bool) -> mx.array:
    """C++, in which packed words are read as they are, once for many rows."""
    sums: mx.array = _kernel()(x.astype(mx.float32), weight, codes)
    return sums


def ternary_product(
    rows: int, inputs: int, weight: mx.array, operands: tuple[int, ...], *, has_codes: bool
) -> Product:
    """The cost of a product with packed trits: additions, of integers for codes of 8 bits."""
    outputs = weight.shape[0]
    count = rows * inputs * outputs
    own = work(integer=count) if has_codes else work(add=count)
    return Product(inputs, outputs, rows, 1, operands, True, own)


def _cost(call: Call) -> Cost:
    x, weight = call.inputs
    dims, has_codes = x.shape[-1], call.options[0]
    product = ternary_product(x.size // dims, dims, weight, (1,), has_codes=has_codes)
    return Cost(product.work, (product,))


def with_split_inputs(examples: Iterator[Example]) -> Iterator[Example]:
    """The examples, those for many rows with both of our kernels for them."""
    for example in examples:
        is_large = example.rows is not None and example.rows > FEW_ROWS
        for way in ("tiles", "split") if is_large else (example.product,):
            yield example._replace(product=way)


def _examples() -> Iterator[Example]:
    # arrays of fewer than 8 numbers lie in another address space of Metal; whole words and not
    for rows, dims in product(EXAMPLE_ROWS, (32, 4, 33)):
        weight = mx.zeros((3, packed_width(dims)), mx.uint32)
        for dtype in FLOATS:
            yield Example((mx.zeros((rows, dims), dtype), weight), {"codes": False}, rows)
        yield Example((mx.zeros((rows, dims)), weight), {"codes": True}, rows)


def _all_examples() -> Iterator[Example]:
    return with_split_inputs(_examples())


_kernel = native_kernel("ternary_matmul")
_operation = Operation(
    "ternary_matmul",
    _all_examples,
    costs={"TernaryMatmul": _cost},
    metal=Backend(metal, unsupported),
    native=native,
    chunked=chunked,
    reference=reference,
)

"""Products of activations and a dense matrix of floats or of codes.

Trits with a scale for each group are codes of 2 bits like any others.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ...errors import UsageError
from ..backend.cost import Call, Cost, Product, affine_work, product_work
from ..backend.dispatch import FLOATS, Arrays, Backend, Example, Operation, native_kernel
from ..backend.launch import MAX_GROUP_ROWS
from .definition import BITS as BITS
from .definition import BLOCK_SIZE, chunked, in_blocks, of_mlx, reference, round_activations
from .definition import GROUP_SIZES as GROUP_SIZES
from .definition import AffineFormat as AffineFormat
from .metal import MOST_ROWS, fault, metal

ENVIRONMENT_VARIABLE = "MLX_MMFREE_ACTIVATION_BITS"


def dense_matmul(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None = None,
    *,
    activation_bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    r"""Multiplies by a dense matrix, as heads with many outputs do for few rows.

    .. math::
        y = x\,W^\top

    Sums are float32 or better. The compiled CPU kernel gives a row the same bits whatever the number of
    rows, which plain MLX operations do not promise. With codes, it holds activations as whole numbers
    that keep what a float holds beside the largest of its group, and a row with an infinity or a NaN
    may give NaN everywhere. The gradient is with respect to `x` and to all floats that make up the
    matrix.

    With 8 activation bits the product is inexact, as in llama.cpp's Q8_0: each 32 neighbours :math:`b`
    of `x` are rounded to multiples of :math:`\max|b| / 127`. The gradient ignores the rounding.

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Floats `(N, D)`. With `quantization`, codes as `mx.quantize` packs them, `uint32` of
            shape `(N, D * bits / 32)`.
        quantization: What turns codes into weights, or `None` for floats.
        activation_bits: 8, for codes of 1 or 2 bits. Default: what `MLX_MMFREE_ACTIVATION_BITS` says of
            these codes, and otherwise nothing is rounded.
        dtype: That of the result.

    Returns:
        `(..., N)`. A GPU multiplies floats with the precision of the dtypes of `x` and `W`. On Metal, up
        to 8 rows meet codes of 1, 2 or 6 bits in float32.

    Raises:
        UsageError: `MLX_MMFREE_ACTIVATION_BITS` is not 8.
        ValueError: A shape or dtype does not fit, or activations are rounded for other codes.

    Example:
        >>> dense_matmul(mx.array([[1.0, 2.0]]), mx.array([[1.0, 0.0], [3.0, 1.0]])).tolist()
        [[1.0, 5.0]]
    """
    _check(x, weight, quantization)
    has_few_bits = quantization is not None and quantization.bits <= 2
    if activation_bits is None:
        rounds = has_few_bits and rounds_activations()
        if rounds:
            _warn_of_rounding()
    elif activation_bits == 8 and has_few_bits:
        rounds = True
    else:
        raise ValueError(
            "[dense_matmul] 'activation_bits' must be 8, for codes of 1 or 2 bits, but got "
            f"{activation_bits!r:.40}" + ("." if has_few_bits else " for another matrix.")
        )
    if x.size == 0 or weight.shape[0] == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype)
    y: mx.array = _operation(x, weight, quantization, rounds, dtype)
    return y


@cache
def rounds_activations() -> bool:
    """Returns whether the environment asks for rounded activations where codes have 1 or 2 bits.

    Raises:
        UsageError: It asks for another number of bits than 8.
    """
    bits = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if bits not in ("", "8"):
        raise UsageError(
            f"[environment] '{ENVIRONMENT_VARIABLE}' must be 8 or unset but got {bits!r:.40}."
        )
    return bool(bits)


@cache
def _warn_of_rounding() -> None:
    warnings.warn(
        f"[mlx_mmfree] Products with codes of 1 and 2 bits are inexact: {ENVIRONMENT_VARIABLE}=8 rounds "
        f"their activations to 8 bits in each {BLOCK_SIZE}. Unset it to compute as the model was made.",
        RuntimeWarning,
        stacklevel=4,
    )


def _check(x: mx.array, weight: mx.array, quantization: AffineFormat | None) -> None:
    if x.ndim < 1:
        raise ValueError("[dense_matmul] 'x' must have shape (..., D) but got a single number.")
    dims = x.shape[-1]
    if quantization is None:
        if weight.dtype not in FLOATS or weight.ndim != 2 or weight.shape[1] != dims:
            raise ValueError(
                f"[dense_matmul] 'weight' must be a float matrix of {dims} columns but got "
                f"{weight.dtype} with shape {weight.shape}."
            )
        return
    scales, biases, group_size, bits = quantization
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise ValueError(
            f"[dense_matmul] 'quantization' must have {_list(BITS)} bits and groups of "
            f"{_list(GROUP_SIZES)} but got {bits} and {group_size}."
        )
    if dims % group_size:
        raise ValueError(
            f"[dense_matmul] 'x' must have a multiple of {group_size} inputs but got {dims}."
        )
    if weight.dtype != mx.uint32 or weight.ndim != 2 or weight.shape[1] * 32 != dims * bits:
        raise ValueError(
            f"[dense_matmul] 'weight' must be a uint32 matrix of {dims * bits // 32} columns but got "
            f"{weight.dtype} with shape {weight.shape}."
        )
    for array in (scales, biases):
        expected = (weight.shape[0], dims // group_size)
        if array.dtype not in FLOATS or array.dtype != scales.dtype or array.shape != expected:
            raise ValueError(
                f"[dense_matmul] 'scales' and 'biases' must be floats of one dtype with shape "
                f"{expected} but got {array.dtype} with shape {array.shape}."
            )


def _list(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def native(
    x: mx.array,
    weight: mx.array,
    quantization: AffineFormat | None,
    rounds: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> mx.array:
    """C++, in which weights are read as they are, in one stream for each thread."""
    scales, biases, _, bits = quantization or (None, None, 0, 0)
    y: mx.array = _kernel()(x.astype(mx.float32), weight, scales, biases, bits, rounds)
    return y.astype(dtype)


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, weight, scales, biases = arrays
    if scales is None:
        return [in_blocks(x, weight, None)]
    group_size = x.shape[-1] // scales.shape[1]
    bits, rounds = options
    x = round_activations(x) if rounds else x
    return [in_blocks(x, weight, AffineFormat(scales, biases, group_size, bits))]


def _cost(call: Call) -> Cost:
    x, weight, scales, _ = call.arguments
    inputs, outputs = x.shape[-1], weight.shape[0]
    rows = x.size // inputs
    own = product_work(rows * inputs * outputs)
    if scales is not None:
        own = affine_work(rows, inputs, outputs, scales.shape[1])
    return Cost(own, (Product(inputs, outputs, rows, 1, (0, 1), False, own),))


def _examples() -> Iterator[Example]:
    for dtype in FLOATS:
        x, weight = mx.zeros((1, 128), dtype), mx.zeros((4, 128), dtype)
        yield Example((x, weight, None))
        for bits in BITS:
            group = mx.zeros((8, 2), dtype)
            variant = AffineFormat(group, group, 64, bits)
            codes = mx.zeros((8, 4 * bits), mx.uint32)
            for rows in range(1, MOST_ROWS):
                args = mx.zeros((rows, 128), dtype), codes, variant, False, dtype
                yield Example(args, rows=min(rows, MAX_GROUP_ROWS))
            if bits <= 2:
                yield Example((x, codes, variant, True, dtype), rows=1)


_kernel = native_kernel("dense_matmul", _definition)
_operation = Operation(
    "dense_matmul",
    _examples,
    costs={"DenseMatmul": _cost},
    metal=Backend(metal, fault=fault),
    cuda=of_mlx,
    native=native,
    chunked=chunked,
    reference=reference,
)

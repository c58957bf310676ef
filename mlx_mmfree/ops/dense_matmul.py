"""Products of activations and a dense matrix of floats or codes, and a linear layer's product.

Trits with a scale for each group are codes of 2 bits like any others: a product of their own takes as
long.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import UsageError
from .backend.cost import Call, Cost, Product, affine_work, product_work
from .backend.dispatch import FLOATS, Arrays, Example, Operation, native_kernel, on_cpu
from .backend.gradient import with_reference_gradient

BITS = (1, 2, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)
BLOCK_SIZE = 32
"""Neighbouring activations that share a scale where they are rounded."""
ENVIRONMENT_VARIABLE = "MLX_MMFREE_ACTIVATION_BITS"


class AffineForm(NamedTuple):
    """MLX's affine form, in which a weight is `scale * code + bias` with one scale and bias for a group.

    Attributes:
        scales: `(N, D / group_size)`, float32, float16 or bfloat16.
        biases: Of the shape and dtype of `scales`.
        group_size: 32, 64 or 128.
        bits: The bits of a code: 1, 2, 4, 6 or 8.

    Example:
        >>> codes, scales, biases = mx.quantize(mx.ones((6, 64)), group_size=32, bits=4)
        >>> form = AffineForm(scales, biases, group_size=32, bits=4)
        >>> dense_matmul(mx.ones((1, 64)), codes, form).shape
        (1, 6)
    """

    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int


def dense_matmul(
    x: mx.array,
    weight: mx.array,
    quantization: AffineForm | None = None,
    *,
    activation_bits: int | None = None,
) -> mx.array:
    r"""Multiplies by a dense matrix, as heads with many outputs do for few rows.

    .. math::
        y = x\,W^\top

    Sums are float32 or better. The compiled CPU kernel gives a row the same bits whatever the number of
    rows, which plain MLX operations do not promise. With codes, it holds activations as whole numbers
    that keep what a float holds beside the largest of its group, and a row with an infinity or a NaN
    may give NaN everywhere. The gradient is that of `x` and of all floats that make up the matrix.

    With 8 activation bits the product is inexact, as in llama.cpp's Q8_0: each 32 neighbours :math:`b`
    of `x` are rounded to multiples of :math:`\max|b| / 127`. The gradient ignores the rounding.

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Floats `(N, D)`. With `quantization`, codes as `mx.quantize` packs them, `uint32` of
            shape `(N, D * bits / 32)`.
        quantization: What turns codes into weights, or `None` for floats.
        activation_bits: 8, for codes of 1 or 2 bits. Default: what `MLX_MMFREE_ACTIVATION_BITS` says of
            these codes, and otherwise nothing is rounded.

    Returns:
        float32 of shape `(..., N)`. A GPU computes with the precision of the dtypes of `x` and `W`.

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
        return mx.zeros((*x.shape[:-1], weight.shape[0]))
    y: mx.array = _operation(x, weight, quantization, rounds)
    return y


@cache
def rounds_activations() -> bool:
    """Whether the environment asks for rounded activations where codes have 1 or 2 bits.

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


def round_activations(x: mx.array) -> mx.array:
    """Each 32 neighbours as multiples of their largest magnitude / 127, with the gradient of `x`."""
    x = x.astype(mx.float32)
    blocks = mx.unflatten(mx.stop_gradient(x), -1, (-1, BLOCK_SIZE))
    largest = mx.abs(blocks).max(axis=-1, keepdims=True)
    # smaller blocks count as zeros, since their scale would be no normal number
    inverse = mx.where(largest < 1e-30, 0.0, 127.0 / largest)
    rounded = mx.flatten(mx.round(blocks * inverse) * (largest / 127.0), -2)
    return x + mx.stop_gradient(rounded - x)


def _check(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> None:
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


def reference(
    x: mx.array, weight: mx.array, quantization: AffineForm | None, rounds: bool = False
) -> mx.array:
    """The definition: one float32 product."""
    x = round_activations(x) if rounds else x
    if quantization is not None:
        scales, biases, group_size, bits = quantization
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        weight = mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)
    return x.astype(mx.float32) @ weight.astype(mx.float32).T


BLOCK_WEIGHTS = 2**24
FEW_ROWS = 2
"""The most rows for which MLX multiplies codes in less time than it takes to write them out."""


def chunked(
    x: mx.array, weight: mx.array, quantization: AffineForm | None, rounds: bool = False
) -> mx.array:
    """MLX's own product for few rows and codes; otherwise the definition for some outputs at a time."""
    x = round_activations(x) if rounds else x
    if quantization is None or x.size > FEW_ROWS * x.shape[-1]:
        return in_blocks(x, weight, quantization)
    scales, biases = (part.astype(mx.float32) for part in quantization[:2])
    form = quantization._replace(scales=scales, biases=biases)
    return _of_mlx(x.astype(mx.float32), weight, form)


def in_blocks(x: mx.array, weight: mx.array, quantization: AffineForm | None) -> mx.array:
    """The definition for some outputs at a time, so that few weights are held as float32."""
    if quantization is None and weight.dtype == mx.float32:
        return reference(x, weight, None)
    rows = max(BLOCK_WEIGHTS // max(x.shape[-1], 1), 1)
    parts = []
    for start in range(0, max(weight.shape[0], 1), rows):
        block = slice(start, start + rows)
        part = quantization and quantization._replace(
            scales=quantization.scales[block], biases=quantization.biases[block]
        )
        parts.append(reference(x, weight[block], part))
    return mx.concatenate(parts, axis=-1)


def _of_mlx(
    x: mx.array, weight: mx.array, quantization: AffineForm | None, rounds: bool = False
) -> mx.array:
    """MLX's own kernels, in the dtype of the arguments."""
    x = round_activations(x).astype(x.dtype) if rounds else x
    if quantization is None:
        return (x @ weight.T).astype(mx.float32)
    scales, biases, group_size, bits = quantization
    y = mx.quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=bits)
    return y.astype(mx.float32)


def native(
    x: mx.array, weight: mx.array, quantization: AffineForm | None, rounds: bool = False
) -> mx.array:
    """C++, in which weights are read as they are, in one stream for each thread."""
    scales, biases, _, bits = quantization or (None, None, 0, 0)
    y: mx.array = _kernel()(x.astype(mx.float32), weight, scales, biases, bits, rounds)
    return y


def _definition(arrays: Sequence[Any], options: tuple[Any, ...], results: Arrays) -> Arrays:
    x, weight, scales, biases = arrays
    if scales is None:
        return [in_blocks(x, weight, None)]
    group_size = x.shape[-1] // scales.shape[1]
    bits, rounds = options
    x = round_activations(x) if rounds else x
    return [in_blocks(x, weight, AffineForm(scales, biases, group_size, bits))]


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
            group = mx.zeros((4, 2), dtype)
            codes = mx.zeros((4, 4 * bits), mx.uint32)
            yield Example((x, codes, AffineForm(group, group, 64, bits)))
            if bits <= 2:
                yield Example((x, codes, AffineForm(group, group, 64, bits), True))


_kernel = native_kernel("dense_matmul", _definition)
_operation = Operation(
    "dense_matmul",
    _examples,
    costs={"DenseMatmul": _cost},
    metal=_of_mlx,
    cuda=_of_mlx,
    native=native,
    chunked=chunked,
    reference=reference,
)


_ROWS = 16
"""The fewest rows whose gradient is laid out."""


def linear_product(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    r"""Multiplies rows by the transpose of a matrix, :math:`y = x W^\top + b`.

    MLX gives the gradient of the weight as the transpose of :math:`x^\top \mathrm{d}y`. On a CPU, an
    optimizer that meets such an array beside others reads it number by number. Here it is
    :math:`\mathrm{d}y^\top x`, row by row. On a CPU a bias is added to the product, where MLX would
    first copy it into every row of the result.

    Args:
        x: `(..., K)`.
        weight: `(N, K)`.
        bias: `(N,)`; `None` means zeros. It may have more bits than `x` and the matrix.

    Returns:
        `(..., N)`.

    Example:
        >>> weight = mx.array([[1.0, 0.0], [3.0, 1.0]])
        >>> linear_product(mx.array([[1.0, 2.0]]), weight, mx.ones(2)).tolist()
        [[2.0, 6.0]]
    """
    # a decoded token needs no gradient, and every operation counts
    has_few_rows = x.dtype != weight.dtype or x.size < _ROWS * x.shape[-1]
    adds = has_few_rows or not on_cpu()
    if bias is not None and adds and bias.dtype in (x.dtype, weight.dtype):
        return mx.addmm(bias, x, weight.T)
    y: mx.array = x @ weight.T if has_few_rows else _product(x, weight)
    return y if bias is None else add_bias(y, bias)


def add_bias(y: mx.array, bias: mx.array) -> mx.array:
    """`y + b` in the dtype of `y`. A bias of more bits is added as it is, in one launch of a GPU."""
    if bias.dtype == y.dtype:
        return y + bias
    return _add(y, bias) if on_cpu() else _fused_sum()(y, bias)


def _add(y: mx.array, bias: mx.array) -> mx.array:
    return (y + bias).astype(y.dtype)


@cache
def _fused_sum() -> Callable[[mx.array, mx.array], mx.array]:
    return mx.compile(_add, shapeless=True)


def _multiply(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def _backward(
    inputs: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    (x, weight), (d_y,) = inputs, cotangents
    d_weight = d_y.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1])
    return d_y @ weight, d_weight


_product = with_reference_gradient(_multiply, _multiply, _backward, is_differentiable=True)

"""Product of activations and a dense matrix of floats or of 2- to 8-bit codes."""

from typing import NamedTuple

import mlx.core as mx

from ..backend.dispatch import dispatch
from ..float_dtypes import FLOATS

BITS = (2, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)


class AffineForm(NamedTuple):
    """MLX's affine form, in which a weight is `scale * code + bias` with one scale and bias for a group.

    Attributes:
        scales: `(N, D / group_size)`, float32, float16 or bfloat16.
        biases: Of the shape and dtype of `scales`.
        group_size: 32, 64 or 128.
        bits: The bits of a code: 2, 4, 6 or 8.

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


def dense_matmul(x: mx.array, weight: mx.array, quantization: AffineForm | None = None) -> mx.array:
    r"""Multiplies by a dense matrix, as heads with many outputs do for few rows.

    .. math::
        y = x\,W^\top

    Sums are float32 or better. The compiled CPU kernel gives a row the same bits whatever the number of
    rows, which plain MLX operations do not promise. With codes, its activations may be rounded to 16
    bits in each group, which costs up to `1e-4` of the largest result, and a row with an infinity or a
    NaN may give NaN everywhere. The gradient is that of `x` and of all floats that make up the matrix.

    Args:
        x: Activations `(..., D)`, any float dtype.
        weight: Floats `(N, D)`. With `quantization`, codes as `mx.quantize` packs them, `uint32` of
            shape `(N, D * bits / 32)`.
        quantization: What turns codes into weights, or `None` for floats.

    Returns:
        float32 of shape `(..., N)`. A GPU computes with the precision of the dtypes of `x` and `W`.

    Raises:
        ValueError: A shape or dtype does not fit.

    Example:
        >>> dense_matmul(mx.array([[1.0, 2.0]]), mx.array([[1.0, 0.0], [3.0, 1.0]])).tolist()
        [[1.0, 5.0]]
    """
    _check(x, weight, quantization)
    if x.size == 0 or weight.shape[0] == 0:
        return mx.zeros((*x.shape[:-1], weight.shape[0]))
    y: mx.array = dispatch(__name__, x, weight, quantization)
    return y


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

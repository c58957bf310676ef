"""Products of activations and a matrix of floats, as dense linear layers have them."""

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

from .backend.dispatch import on_cpu
from .backend.gradient import with_reference_gradient

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

"""Activations: the values of MLX's own, and what holds where exponentials overflow or cancel."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.ops import activations
from mlx_mmfree.ops.activations import elu_plus_one, log_sigmoid

NUMBERS = np.concatenate([np.linspace(-30, 30, 1201), [0.0, -0.0, 89.0, -89.0, 1e4, -1e4]])
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
OF_MLX = {
    "relu": nn.relu,
    "silu": nn.silu,
    "log_sigmoid": nn.log_sigmoid,
    "gelu": nn.gelu,
    "gelu_tanh": nn.gelu_approx,
    "hardswish": nn.hardswish,
}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", OF_MLX)
@by_dtype
def test_bits_are_those_of_mlx(name: str, dtype: mx.Dtype) -> None:
    x = mx.array(NUMBERS.astype(np.float32)).astype(dtype)
    own, other = getattr(activations, name)(x), OF_MLX[name](x)
    assert own.dtype == dtype and mx.array_equal(own, other)


@pytest.mark.parametrize("name", [*OF_MLX, "elu_plus_one", "squared_relu"])
@by_dtype
def test_gradients_are_finite_where_exponentials_overflow(name: str, dtype: mx.Dtype) -> None:
    x = mx.array(NUMBERS.astype(np.float32)).astype(dtype)
    gradient = mx.grad(lambda x: getattr(activations, name)(x).astype(mx.float32).sum())(x)
    assert mx.isfinite(gradient).all().item()


def test_elu_plus_one_is_an_exponential_below_zero() -> None:
    x = np.concatenate([NUMBERS, np.linspace(-85, -15, 71)]).astype(np.float32)
    want = np.where(x > 0, x.astype(np.float64) + 1, np.exp(np.minimum(x, 0).astype(np.float64)))
    assert np.allclose(np.array(elu_plus_one(mx.array(x))), want, rtol=1e-5, atol=1e-38)
    slope = np.where(x > 0, 1, want)
    got = mx.grad(lambda x: elu_plus_one(x).sum())(mx.array(x))
    assert np.allclose(np.array(got), slope, rtol=1e-5, atol=1e-38)


def test_log_sigmoid_of_large_numbers() -> None:
    found = log_sigmoid(mx.array([-1e4, -89.0, 0.0, 30.0]))
    assert found.tolist() == pytest.approx([-1e4, -89.0, -math.log(2), -math.exp(-30)], rel=1e-6)

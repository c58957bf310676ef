"""Activations of numbers and their gradients in one pass, against definition and float64."""

import math
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import activate, use_backend
from mlx_mmfree.ops.activations import Activation
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

NAMES: tuple[Any, ...] = get_args(Activation)
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def results(backend: str, x: mx.array, factor: mx.array, name: Any) -> list[mx.array]:
    with use_backend(backend):
        found = [activate(x, name), mx.grad(lambda x: (activate(x, name) * factor).sum())(x)]
        mx.eval(found)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(20,), (3, 5, 7), (4, 5000)])
def test_equals_definition(shape: tuple[int, ...], dtype: mx.Dtype, name: Any) -> None:
    mx.random.seed(len(shape))
    x, factor = (1.0 + 3 * mx.random.normal(shape)).astype(dtype), mx.random.normal(shape)
    # lies apart in memory
    x = mx.contiguous(x.T).T
    want = results("reference", x.astype(mx.float32), factor, name)
    got = results("native", x, factor, name)
    assert got[0].dtype == (mx.float32 if name == "relu2" else dtype) and got[1].dtype == dtype
    for own, other in zip(got, want, strict=True):
        assert relative_error(own, other) <= TOLERANCE[dtype]


def test_gelu_equals_float64_in_every_part() -> None:
    x = np.linspace(-14, 14, 100_001).astype(np.float32)
    share = np.array([0.5 * math.erfc(-float(v) / math.sqrt(2)) for v in x])
    want = x * share
    got, gradient = results("native", mx.array(x), mx.ones(x.shape), "gelu")
    assert np.abs(np.array(got) - want).max() <= 1e-6
    # the tail is no difference of numbers near one
    near = x > -5
    assert (np.abs(np.array(got) - want)[near] <= 1e-6 * np.abs(want)[near]).all()
    slope = share + x * np.exp(-0.5 * x.astype(np.float64) ** 2) / math.sqrt(2 * math.pi)
    assert np.abs(np.array(gradient) - slope).max() <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_extreme_numbers_and_nan_are_those_of_the_definition(name: Any) -> None:
    # -infinity times the share 0 is NaN in the definition, where one of them is the limit
    x = mx.array([mx.inf, mx.nan, 1e18, -1e18, -0.0, 0.0])
    got, want = (np.array(results(b, x, mx.ones(6), name)[0]) for b in ("native", "reference"))
    assert np.allclose(got, want, atol=1e-6, equal_nan=True)


def test_a_single_number() -> None:
    y, gradient = results("native", mx.array(0.0), mx.array(1.0), "gelu")
    assert (y.shape, y.item(), gradient.item()) == ((), 0.0, 0.5)


def test_threads_do_not_change_bits(instructions: str) -> None:
    x, factor = mx.random.normal((100_003,)), mx.random.normal((100_003,))
    kernels = native.kernels()
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            found.append(results("native", x, factor, "gelu"))
    finally:
        kernels.set_threads(before)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    x = mx.random.normal((3, 5))
    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(
                lambda x: mx.grad(lambda x: activate(x, "gelu").sum())(x).square().sum()
            )
            found.append([mx.compile(second)(x), mx.vmap(second)(x)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= 1e-4


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="one of silu, relu2, gelu, relu but got 'tanh'"):
        activate(mx.ones(3), "tanh")
    kernel = native.kernels().activate
    with pytest.raises(ValueError, match="'x' must be floats"):
        kernel(mx.ones(3, mx.int32), "gelu")
    for name in ("", "tanh"):
        with pytest.raises(ValueError, match="'activation' is unknown"):
            kernel(mx.ones(3), name)

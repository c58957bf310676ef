"""Activations of gates and their gradients in one pass, against their definition."""

from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import gated, gated_activation, use_backend
from mlx_mmfree.ops.activations import Activation
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

NAMES: tuple[Any, ...] = get_args(Activation)
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
LAYOUTS = {
    "dense": lambda x: x,
    "halves": lambda x: mx.split(mx.concatenate([x, -x], axis=-1), 2, axis=-1)[0],
    "turned": lambda x: mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1),
    "reversed": lambda x: mx.contiguous(x[..., ::-1])[..., ::-1],
    "shared": lambda x: mx.broadcast_to(x[:1], x.shape),
}


def results(backend: str, gate: mx.array, up: mx.array, weight: mx.array, name: Any) -> list:
    with use_backend(backend):
        y = gated_activation(gate, up, name)
        gradients = mx.grad(
            lambda *arrays: (gated_activation(*arrays, name) * weight).sum(), argnums=(0, 1)
        )(gate, up)
        mx.eval(y, gradients)
    return [y, *gradients]


@pytest.mark.sample(1, of="name")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_definition(name: Any, layout: str, dtype: mx.Dtype) -> None:
    mx.random.seed(1)
    gate, up, weight = (3 * mx.random.normal((3, 37, 65)) for _ in range(3))
    gate, up = (LAYOUTS[layout](x.astype(dtype)) for x in (gate, up))
    got = results("native", gate, up, weight, name)
    want = results("reference", gate.astype(mx.float32), up.astype(mx.float32), weight, name)
    dtypes = [mx.float32 if name == "relu2" else dtype, dtype, dtype]
    for own, other, expected in zip(got, want, dtypes, strict=True):
        assert own.dtype == expected
        assert relative_error(own, other) <= TOLERANCE[expected]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name: Any) -> None:
    rng = np.random.default_rng(2)
    # none at the corner of ReLU
    gate, up = rng.uniform(0.1, 4, (2, 31)) * rng.choice([-1, 1], (2, 31)), rng.normal(size=(2, 31))

    def value(gate: np.ndarray) -> np.ndarray:
        from math import erf

        activations = {
            "silu": lambda x: x / (1 + np.exp(-x)),
            "relu2": lambda x: np.maximum(x, 0) ** 2,
            "gelu": lambda x: x * (1 + np.vectorize(erf)(x / 2**0.5)) / 2,
            "relu": lambda x: np.maximum(x, 0),
        }
        return activations[name](gate)

    slope = (value(gate + 1e-6) - value(gate - 1e-6)) / 2e-6
    arrays = [mx.array(x.astype(np.float32)) for x in (gate, up)]
    _, d_gate, d_up = results("native", *arrays, mx.ones((2, 31)), name)
    assert np.allclose(np.array(d_gate), slope * up, rtol=1e-4, atol=1e-5)
    assert np.allclose(np.array(d_up), value(gate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_halves_of_one_array(name: Any, dtype: mx.Dtype, threads: int) -> None:
    mx.random.seed(5)
    x, weight = mx.random.normal((3, 37, 130)).astype(dtype), mx.random.normal((3, 37, 65))
    for given in (x, x[:, ::2], mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1)):
        own_weight = weight[:, : given.shape[1]]

        def loss(x: mx.array, w: mx.array = own_weight) -> mx.array:
            return (gated(x, name) * w).sum()

        with use_backend("native"):
            y, d_x = gated(given, name), mx.grad(loss)(given)
            gate, up = mx.split(given, 2, axis=-1)
            apart = results("native", gate, up, own_weight, name)
        assert mx.array_equal(y, apart[0])
        assert mx.array_equal(d_x, mx.concatenate(apart[1:], axis=-1))


def test_extreme_gates() -> None:
    gate = mx.array([-mx.inf, -200.0, -90.0, 0.0, 90.0, 200.0, 3e38, mx.nan])
    y, d_gate, _ = results("native", gate, mx.ones(8), mx.ones(8), "silu")
    assert mx.isnan(y[-1]) and mx.isnan(d_gate[-1])
    assert mx.abs(y[1:3]).max() < 1e-34 and mx.abs(d_gate[1:3]).max() < 1e-34
    assert mx.array_equal(y[3:7], gate[3:7]) and mx.array_equal(d_gate[4:7], mx.ones(3))


def test_threads_and_rows_do_not_change_bits(threads: int, instructions: str) -> None:
    mx.random.seed(3)
    arrays = [mx.random.normal((40, 1000)) for _ in range(3)]
    whole = results("native", *arrays, "silu")
    alone = results("native", *(x[7:9] for x in arrays), "silu")
    assert all(mx.array_equal(a[7:9], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    mx.random.seed(4)
    gate, up = mx.random.normal((3, 2, 9)), mx.random.normal((3, 2, 9))

    def curvature(*arrays: mx.array) -> mx.array:
        inner = mx.grad(lambda *a: gated_activation(*a, "silu").square().sum(), argnums=(0, 1))
        return sum(g.square().sum() for g in inner(*arrays))

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature, argnums=(0, 1))
            found.append([*mx.compile(second)(gate, up), *mx.vmap(second)(gate, up)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= TOLERANCE[mx.float32]


def test_second_order_of_halves() -> None:
    x = mx.random.normal((2, 10))

    def curvature(x: mx.array) -> mx.array:
        return mx.grad(lambda x: gated(x, "silu").square().sum())(x).square().sum()

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            found.append(mx.grad(curvature)(x))
    assert relative_error(*found) <= TOLERANCE[mx.float32]


def test_what_is_refused() -> None:
    x = mx.ones((2, 3))
    with pytest.raises(ValueError, match=r"'x' must have an even last axis but got \(2, 3\)"):
        gated(x, "silu")
    with pytest.raises(ValueError, match="must be one of silu, relu2, gelu, relu but got 'tanh'"):
        gated_activation(x, x, "tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the same shape and dtype but got \(2, 3\)"):
        gated_activation(x, x[:1], "silu")
    kernel = native.kernels().gated_activation
    with pytest.raises(ValueError, match=r"must be \(..., D\)"):
        kernel(x, x[:1], "silu")
    with pytest.raises(ValueError, match="floats of one dtype"):
        kernel(x, x.astype(mx.float16), "silu")
    for name in ("tanh", ""):
        with pytest.raises(ValueError, match="'activation' is unknown"):
            kernel(x, x, name)


def test_empty() -> None:
    x = mx.zeros((0, 5))
    assert gated_activation(x, x, "silu").shape == (0, 5)
    y, d_gate, _ = results("native", x, x, x, "relu2")
    assert y.shape == d_gate.shape == (0, 5)
    assert native.kernels().gated_activation(x, x, "silu").shape == (0, 5)

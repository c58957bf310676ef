"""The gradient of a linear layer's weight lies in memory as the weight does."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.ops import linear_product
from tests.graph import operations
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def loss(x: mx.array, weight: mx.array) -> mx.array:
    return linear_product(x, weight).square().sum()


def plain(x: mx.array, weight: mx.array) -> mx.array:
    return (x @ weight.T).square().sum()


@pytest.mark.parametrize("shape", [(5,), (2, 5), (40, 5), (3, 20, 5), (0, 5)])
@pytest.mark.parametrize("dtypes", [(mx.float32,) * 2, (mx.bfloat16, mx.float32)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtypes: tuple[mx.Dtype, mx.Dtype]) -> None:
    mx.random.seed(1)
    x, weight = (
        mx.random.normal(shape).astype(dtypes[0]),
        mx.random.normal((7, 5)).astype(dtypes[1]),
    )
    assert mx.array_equal(linear_product(x, weight), x @ weight.T)
    got, want = (mx.grad(value, argnums=(0, 1))(x, weight) for value in (loss, plain))
    for own, other in zip(got, want, strict=True):
        assert own.dtype == other.dtype
        assert relative_error(own, other) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("shape", [(5,), (2, 5), (40, 5), (3, 20, 5)])
@pytest.mark.parametrize("dtypes", [(mx.float32,) * 2, (mx.bfloat16, mx.float32)], ids=str)
def test_a_bias_is_that_of_a_linear(shape: tuple[int, ...], dtypes: tuple[mx.Dtype, ...]) -> None:
    mx.random.seed(2)
    linear = nn.Linear(5, 7)
    linear.set_dtype(dtypes[1])
    arrays = [mx.random.normal(shape).astype(dtypes[0]), linear.weight, linear.bias]

    def by_layer(x: mx.array, weight: mx.array, bias: mx.array) -> mx.array:
        linear.update({"weight": weight, "bias": bias})
        return linear(x)

    got, want = linear_product(*arrays), by_layer(*arrays)
    assert got.dtype == want.dtype
    assert relative_error(got, want) <= TOLERANCE[mx.float32]
    gradients = [
        mx.grad(lambda *given, f=function: f(*given).square().sum(), argnums=(0, 1, 2))(*arrays)
        for function in (linear_product, by_layer)
    ]
    for own, other in zip(*gradients, strict=True):
        assert own.dtype == other.dtype
        assert relative_error(own, other) <= max(GRADIENT_TOLERANCE, TOLERANCE[own.dtype])


def test_gradient_of_the_weight_is_laid_out_as_it_is() -> None:
    x, weight = mx.random.normal((3, 20, 5)), mx.random.normal((7, 5))
    for value, is_laid_out in ((loss, True), (plain, False)):
        gradient = mx.grad(value, argnums=1)(x, weight)
        mx.eval(gradient)
        assert memoryview(gradient).c_contiguous == is_laid_out


def test_a_frozen_matrix_costs_no_product() -> None:
    x, weight, d_y = mx.ones((20, 5)), mx.ones((7, 5)), mx.ones((20, 7))
    of_x = mx.vjp(lambda x: linear_product(x, weight), [x], [d_y])[1]
    of_weight = mx.vjp(lambda weight: linear_product(x, weight), [weight], [d_y])[1]
    assert operations(of_x)["Matmul"] == operations(of_weight)["Matmul"] == 1


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    x, weight = mx.random.normal((2, 20, 5)), mx.random.normal((7, 5))

    def curvature(value):  # type: ignore[no-untyped-def]
        inner = mx.grad(value, argnums=(0, 1))
        return mx.grad(lambda x, w: sum(g.square().sum() for g in inner(x, w)), argnums=(0, 1))

    for own, other in zip(
        mx.compile(curvature(loss))(x, weight), curvature(plain)(x, weight), strict=True
    ):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE
    of_slices = mx.vmap(mx.grad(loss), in_axes=(0, None))(x, weight)
    assert relative_error(of_slices[1], mx.grad(plain)(x[1], weight)) <= GRADIENT_TOLERANCE

"""The compiled product with matrices that rows name."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import gather_ternary_matmul, pack_ternary, unpack_ternary, use_backend
from mlx_mmfree.ops.gather_ternary_matmul import reference
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason="no compiled kernels")


def matrices(experts: int, outputs: int, dims: int) -> mx.array:
    mx.random.seed(experts + outputs + dims)
    trits = mx.random.randint(-1, 2, (experts * outputs, dims))
    return pack_ternary(trits).reshape(experts, outputs, -1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize(("outputs", "dims"), [(1, 1), (33, 70), (512, 2048)])
def test_equals_the_definition(rows: int, outputs: int, dims: int) -> None:
    weight, x = matrices(5, outputs, dims), mx.random.normal((rows, 2, dims))
    for indices in (mx.random.randint(0, 5, (rows, 2)), mx.zeros((rows, 2), mx.int32)):
        with use_backend("native"):
            got = gather_ternary_matmul(x, weight, indices)
        assert relative_error(got, reference(x, weight, indices)) <= TOLERANCE[mx.float32]


def test_gradient_and_its_gradient() -> None:
    weight, x = matrices(4, 33, 70), mx.random.normal((9, 70))
    indices = mx.random.randint(0, 4, (9,))

    def loss(product, x: mx.array) -> mx.array:  # type: ignore[no-untyped-def]
        return mx.sin(product(x, weight, indices)).sum()

    def second(product, x: mx.array) -> mx.array:  # type: ignore[no-untyped-def]
        return mx.grad(lambda x: loss(product, x))(x).square().sum()

    for function in (loss, second):
        want = mx.grad(lambda x, f=function: f(reference, x))(x)
        with use_backend("native"):
            got = mx.grad(lambda x, f=function: f(gather_ternary_matmul, x))(x)
        assert relative_error(got, want) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("rows", [8, 200])
def test_gradient_in_float64(rows: int) -> None:
    """At the sizes of a published expert, `dx = dy T[index]` row by row."""
    experts, outputs, dims = 6, 512, 2048
    weight, x = matrices(experts, outputs, dims), mx.random.normal((rows, dims))
    dy, indices = mx.random.normal((rows, outputs)), mx.random.randint(0, experts - 1, (rows,))
    with use_backend("native"):
        _, [dx] = mx.vjp(lambda x: gather_ternary_matmul(x, weight, indices), [x], [dy])
    want = np.zeros((rows, dims))
    for expert in range(experts):
        own = np.array(indices) == expert
        trits = np.array(unpack_ternary(weight[expert], dims), np.float64)
        want[own] = np.array(dy, np.float64)[own] @ trits
    assert relative_error(dx, mx.array(want)) <= TOLERANCE[mx.float32]


def test_a_row_that_names_no_matrix_is_nan_alone() -> None:
    weight, x = matrices(3, 8, 32), mx.random.normal((4, 32))
    with use_backend("native"):
        got = gather_ternary_matmul(x, weight, mx.array([0, 3, 2, 2**31 - 1]))
        want = gather_ternary_matmul(x[::2], weight, mx.array([0, 2]))
    assert mx.array_equal(got[::2], want)
    assert mx.isnan(got[1::2]).all().item()


def test_a_row_has_the_same_bits_alone() -> None:
    weight, x = matrices(3, 40, 96), mx.random.normal((50, 96))
    indices = mx.random.randint(0, 3, (50,))
    with use_backend("native"):
        whole = gather_ternary_matmul(x, weight, indices)
        for row in (0, 17, 49):
            alone = gather_ternary_matmul(x[row : row + 1], weight, indices[row : row + 1])
            assert mx.array_equal(whole[row : row + 1], alone)

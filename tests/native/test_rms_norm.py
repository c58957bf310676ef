"""Norms and their gradients in one pass, against their definition and float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import rms_norm, use_backend
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def results(backend: str, x: mx.array, weight: mx.array | None, factor: mx.array) -> list:
    arrays = (x,) if weight is None else (x, weight)

    def loss(*arrays: mx.array) -> mx.array:
        return (rms_norm(*arrays, eps=1e-5) * factor).sum()

    with use_backend(backend):
        found = [rms_norm(*arrays, eps=1e-5)]
        found += mx.vjp(loss, list(arrays), [mx.array(1.0)])[1]
        mx.eval(found)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("dims", [2, 17, 64, 1000])
@pytest.mark.parametrize("rows", [1, 63, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_weight", [True, False])
def test_equals_definition(rows: int, dims: int, dtype: mx.Dtype, has_weight: bool) -> None:
    mx.random.seed(rows + dims)
    x = mx.contiguous(mx.random.normal((rows, 2, dims)).swapaxes(0, 1)).swapaxes(0, 1)
    x, factor = x.astype(dtype), mx.random.normal((rows, 2, dims))
    weight = 1 + 0.1 * mx.random.normal((dims,)) if has_weight else None
    got = results("native", x, weight, factor)
    want = results("reference", x.astype(mx.float32), weight, factor)
    assert [array.dtype for array in got] == [dtype, dtype, mx.float32][: len(got)]
    for own, other in zip(got, want, strict=True):
        assert relative_error(own, other) <= max(TOLERANCE[dtype], GRADIENT_TOLERANCE)


def test_equals_float64_over_8192_dims_and_rows() -> None:
    for rows, dims in ((8, 8192), (8192, 8)):
        mx.random.seed(dims)
        arrays = mx.random.normal((rows, dims)), mx.random.normal((dims,))
        factor = mx.random.normal((rows, dims))
        x, w, g = (np.array(array, np.float64) for array in (*arrays, factor))
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        n, own = x * inverse, g * w
        want = [n * w, inverse * (own - n * (own * n).mean(-1, keepdims=True)), (g * n).sum(0)]
        for got, exact in zip(results("native", *arrays, factor), want, strict=True):
            assert np.abs(np.array(got) - exact).max() <= 2e-6 * np.abs(exact).max()


def test_gradients_are_finite_differences() -> None:
    mx.random.seed(1)
    x, weight, factor = (mx.random.normal(shape) for shape in ((2, 7), (7,), (2, 7)))
    _, d_x, d_weight = results("native", x, weight, factor)
    exact = [np.array(array, np.float64) for array in (x, weight)]

    def loss(x: np.ndarray, weight: np.ndarray) -> float:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight
        return float((y * np.array(factor)).sum())

    for number, got in enumerate((d_x, d_weight)):
        for index in np.ndindex(got.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in exact]
                moved[number][index] += step
                ends.append(loss(*moved))
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(np.array(got)[index] - slope) <= 1e-5 * max(1, abs(slope))


def test_threads_do_not_change_bits(instructions: str) -> None:
    mx.random.seed(3)
    arrays = mx.random.normal((500, 130)), mx.random.normal((130,)), mx.random.normal((500, 130))
    kernels = native.kernels()
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            found.append(results("native", *arrays))
    finally:
        kernels.set_threads(before)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    mx.random.seed(4)
    x, weight = mx.random.normal((3, 2, 9)), mx.random.normal((9,))

    def curvature(x: mx.array, weight: mx.array) -> mx.array:
        def loss(*arrays: mx.array) -> mx.array:
            return rms_norm(*arrays, eps=0.1).square().sum()

        return sum(g.square().sum() for g in mx.grad(loss, argnums=(0, 1))(x, weight))

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature, argnums=(0, 1))
            mapped = mx.vmap(second, in_axes=(0, None))
            plain = mx.grad(lambda x: mx.grad(lambda x: rms_norm(x, eps=0.1).sum())(x).sum())
            found.append([*mx.compile(second)(x, weight), *mapped(x, weight), plain(x)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with D > 0 but got \(2, 3\) and \(4,\)"):
        rms_norm(mx.ones((2, 3)), mx.ones(4), eps=1e-6)
    kernel = native.kernels().rms_norm
    with pytest.raises(ValueError, match="'x' must be floats"):
        kernel(mx.ones((2, 3), mx.int32), None, 1e-6)
    with pytest.raises(ValueError, match="'weight' must be floats"):
        kernel(mx.ones((2, 3)), mx.ones(4), 1e-6)


def test_empty() -> None:
    x = mx.zeros((0, 3))
    y, d_x, d_weight = results("native", x, mx.ones(3), x)
    assert y.shape == d_x.shape == (0, 3)
    assert mx.array_equal(d_weight, mx.zeros(3))
    assert native.kernels().rms_norm(x, None, 1e-6).shape == (0, 3)

"""Norms by mean and variance, and their gradients, in one pass, against definition and float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import layer_norm, use_backend
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
Given = tuple[mx.array | None, mx.array | None]


def results(backend: str, x: mx.array, given: Given, factor: mx.array) -> list[mx.array]:
    arrays = [x, *(array for array in given if array is not None)]

    def norm(x: mx.array, *rest: mx.array) -> mx.array:
        own = iter(rest)
        return layer_norm(x, *(None if array is None else next(own) for array in given), eps=1e-5)

    with use_backend(backend):
        found = [norm(*arrays)]
        found += mx.vjp(lambda *arrays: (norm(*arrays) * factor).sum(), arrays, [mx.array(1.0)])[1]
        mx.eval(found)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("dims", [3, 17, 64, 1000])
@pytest.mark.parametrize("rows", [1, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True), (False, False)])
def test_equals_definition(rows: int, dims: int, dtype: mx.Dtype, has: tuple[bool, bool]) -> None:
    mx.random.seed(rows + dims)
    x = mx.contiguous(mx.random.normal((rows, 2, dims)).swapaxes(0, 1)).swapaxes(0, 1)
    x, factor = x.astype(dtype), mx.random.normal((rows, 2, dims))
    weight, bias = 1 + 0.1 * mx.random.normal((dims,)), mx.random.normal((dims,))
    given = (weight if has[0] else None, bias if has[1] else None)
    got = results("native", x, given, factor)
    want = results("reference", x.astype(mx.float32), given, factor)
    assert [array.dtype for array in got] == [dtype, dtype, mx.float32, mx.float32][: len(got)]
    for own, other in zip(got, want, strict=True):
        assert relative_error(own, other) <= max(TOLERANCE[dtype], GRADIENT_TOLERANCE)


def test_equals_float64_far_from_zero() -> None:
    for rows, dims in ((8, 8192), (8192, 8)):
        mx.random.seed(dims)
        x, factor = mx.random.normal((rows, dims)) + 30, mx.random.normal((rows, dims))
        weight, bias = mx.random.normal((dims,)), mx.random.normal((dims,))
        a, w, b, g = (np.array(array, np.float64) for array in (x, weight, bias, factor))
        centred = a - a.mean(-1, keepdims=True)
        inverse = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
        n, own = centred * inverse, g * w
        slope = own - own.mean(-1, keepdims=True) - n * (own * n).mean(-1, keepdims=True)
        want = [n * w + b, inverse * slope, (g * n).sum(0), g.sum(0)]
        for got, exact in zip(results("native", x, (weight, bias), factor), want, strict=True):
            assert np.abs(np.array(got) - exact).max() <= 5e-6 * np.abs(exact).max()


def test_threads_do_not_change_bits(instructions: str) -> None:
    mx.random.seed(3)
    x, factor = mx.random.normal((500, 130)), mx.random.normal((500, 130))
    given = mx.random.normal((130,)), mx.random.normal((130,))
    kernels = native.kernels()
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            found.append(results("native", x, given, factor))
    finally:
        kernels.set_threads(before)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    mx.random.seed(4)
    arrays = mx.random.normal((3, 2, 9)), mx.random.normal((9,)), mx.random.normal((9,))

    def curvature(*arrays: mx.array) -> mx.array:
        def loss(*arrays: mx.array) -> mx.array:
            return layer_norm(*arrays, eps=0.1).square().sum()

        return sum(g.square().sum() for g in mx.grad(loss, argnums=(0, 1, 2))(*arrays))

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature, argnums=(0, 1, 2))
            mapped = mx.vmap(second, in_axes=(0, None, None))
            plain = mx.grad(
                lambda x: mx.grad(lambda x: layer_norm(x, eps=0.1).square().sum())(x).sum()
            )
            found.append([*mx.compile(second)(*arrays), *mapped(*arrays), plain(arrays[0])])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"with D > 0 but got \(2, 3\), \(4,\)"):
        layer_norm(mx.ones((2, 3)), mx.ones(4), eps=1e-6)
    kernel = native.kernels().layer_norm
    with pytest.raises(ValueError, match="'x' must be floats"):
        kernel(mx.ones((2, 3), mx.int32), None, None, 1e-6)
    for given in ((mx.ones(4), None), (None, mx.ones(4))):
        with pytest.raises(ValueError, match="'weight' and 'bias' must be floats"):
            kernel(mx.ones((2, 3)), *given, 1e-6)


def test_empty() -> None:
    x = mx.zeros((0, 3))
    y, d_x, d_weight, d_bias = results("native", x, (mx.ones(3), mx.ones(3)), x)
    assert y.shape == d_x.shape == (0, 3)
    assert mx.array_equal(d_weight, mx.zeros(3)) and mx.array_equal(d_bias, mx.zeros(3))
    assert native.kernels().layer_norm(x, None, None, 1e-6).shape == (0, 3)

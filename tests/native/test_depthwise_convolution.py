"""Depthwise convolutions and their gradients in one pass, against float64 and their definition."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import depthwise_convolution, use_backend
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
# one position, maps smaller than the window, and more than a strip of rows and a chunk of columns
MAPS = [(1, 1, 5), (3, 4, 16), (7, 7, 33), (15, 2, 3), (16, 58, 20), (2, 115, 17)]


def drawn(map_: tuple[int, int, int], side: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    mx.random.seed(sum(map_) + side)
    shapes = (2, *map_), (map_[2], side, side, 1), map_[2:]
    return [mx.random.normal(shape).astype(dtype) for shape in shapes]


def factor(shape: tuple[int, ...]) -> np.ndarray:
    """By which a result is multiplied before it is summed up."""
    return np.random.default_rng(1).normal(1.0, 1.0, shape).astype(np.float32)


def by_formula(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The result, and the gradients of `sum(factor * y)`, in the dtype of the arguments."""
    side, (height, width) = weight.shape[1], x.shape[1:3]
    padded = np.pad(x, [(0, 0), (side // 2,) * 2, (side // 2,) * 2, (0, 0)])
    rows, columns = -(-height // stride), -(-width // stride)

    def windows(u: int, v: int) -> tuple[slice, slice, slice]:
        return (
            slice(None),
            slice(u, u + (rows - 1) * stride + 1, stride),
            slice(v, v + (columns - 1) * stride + 1, stride),
        )

    taps = [(u, v) for u in range(side) for v in range(side)]
    y = bias + sum(padded[windows(u, v)] * weight[:, u, v, 0] for u, v in taps)
    d_y = factor(y.shape).astype(y.dtype)
    d_padded, d_weight = np.zeros_like(padded), np.zeros_like(weight)
    for u, v in taps:
        d_padded[windows(u, v)] += d_y * weight[:, u, v, 0]
        d_weight[:, u, v, 0] = (d_y * padded[windows(u, v)]).sum((0, 1, 2))
    half = side // 2
    d_x = d_padded[:, half : half + height, half : half + width]
    return y, [d_x, d_weight, d_y.sum((0, 1, 2))]


def results(backend: str, arrays: list[mx.array], stride: int) -> list[mx.array]:
    def loss(*given: mx.array) -> mx.array:
        y = depthwise_convolution(*given, stride=stride)
        return (mx.array(factor(y.shape)) * y).sum()

    with use_backend(backend):
        found = [depthwise_convolution(*arrays, stride=stride)]
        found += mx.grad(loss, argnums=tuple(range(len(arrays))))(*arrays)
        mx.eval(found)
    return found


@pytest.mark.sample(8)
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("side", [1, 3, 5, 7, 9, 11])
@pytest.mark.parametrize("map_", MAPS, ids=str)
def test_equals_float64(map_: tuple[int, int, int], side: int, stride: int) -> None:
    arrays = drawn(map_, side)
    y, gradients = by_formula(*(np.array(a, np.float64) for a in arrays), stride)
    for got, want in zip(results("native", arrays, stride), [y, *gradients], strict=True):
        assert got.shape == want.shape
        assert np.abs(np.array(got) - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_definition(dtype: mx.Dtype, stride: int, has_bias: bool) -> None:
    arrays = drawn((9, 6, 37), 5, dtype)[: 3 if has_bias else 2]
    # rows of a transposed map lie apart in memory
    arrays[0] = mx.contiguous(arrays[0].swapaxes(1, 2)).swapaxes(1, 2)
    got = results("native", arrays, stride)
    want = results("reference", [a.astype(mx.float32) for a in arrays], stride)
    for own, other in zip(got, want, strict=True):
        assert own.dtype == dtype
        assert relative_error(own, other) <= max(TOLERANCE[dtype], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("side", [3, 7])
def test_a_map_of_224_positions_a_side(side: int) -> None:
    arrays = drawn((224, 224, 4), side)
    want, gradients = by_formula(*(np.array(a, np.float64) for a in arrays), 2)
    for got, exact in zip(results("native", arrays, 2), [want, *gradients], strict=True):
        assert np.abs(np.array(got) - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.interop
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [3, 7, 11])
@pytest.mark.parametrize("map_", MAPS, ids=str)
def test_equals_torch(map_: tuple[int, int, int], side: int, stride: int) -> None:
    import torch

    arrays = drawn(map_, side)
    order = (0, 3, 1, 2), (0, 3, 1, 2), (0,)
    x, weight, bias = (
        torch.from_numpy(np.array(array).transpose(axes).copy()).requires_grad_()
        for array, axes in zip(arrays, order, strict=True)
    )
    y = torch.nn.functional.conv2d(
        x, weight, bias, stride=stride, padding=side // 2, groups=map_[2]
    )
    result = y.permute(0, 2, 3, 1)
    (result * torch.from_numpy(factor(tuple(result.shape)))).sum().backward()
    got = results("native", arrays, stride)
    for own, other in zip(got[1:], (x.grad, weight.grad, bias.grad), strict=True):
        want = other.permute(0, 2, 3, 1) if other.ndim == 4 else other
        assert relative_error(own, mx.array(want.numpy())) <= GRADIENT_TOLERANCE
    assert relative_error(got[0], mx.array(result.detach().numpy())) <= TOLERANCE[mx.float32]


def test_gradients_of_windows_over_a_million_positions_of_one_sign() -> None:
    x, weight = mx.full((4, 512, 512, 1), 0.1), mx.zeros((1, 1, 1, 1))
    with use_backend("native"):
        d_weight, d_bias = mx.grad(
            lambda *given: depthwise_convolution(x, *given).sum(), argnums=(0, 1)
        )(weight, mx.zeros((1,)))
    assert abs(d_weight.item() / (np.float64(np.float32(0.1)) * 2**20) - 1) <= 1e-6
    assert d_bias.item() == 2**20


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_are_finite_differences(stride: int) -> None:
    arrays = drawn((4, 3, 2), 3)
    exact = [np.array(a, np.float64) for a in arrays]
    _, *gradients = results("native", arrays, stride)

    def loss(*given: np.ndarray) -> float:
        y, _ = by_formula(*given, stride)
        return float((factor(y.shape) * y).sum())

    for number, got in enumerate(gradients):
        for index in np.ndindex(got.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in exact]
                moved[number][index] += step
                ends.append(loss(*moved))
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(np.array(got)[index] - slope) <= 1e-5 * max(1, abs(slope))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_arguments(wanted: tuple[int, ...]) -> None:
    arrays = drawn((5, 6, 7), 3)
    _, *every = results("native", arrays, 1)

    def loss(*some: mx.array) -> mx.array:
        given = dict(zip(wanted, some, strict=True))
        y = depthwise_convolution(*(given.get(n, array) for n, array in enumerate(arrays)))
        return (mx.array(factor(y.shape)) * y).sum()

    with use_backend("native"):
        _, found = mx.vjp(loss, [arrays[n] for n in wanted], [mx.array(1.0)])
    for number, got in zip(wanted, found, strict=True):
        assert mx.array_equal(got, every[number])


def test_threads_do_not_change_bits(instructions: str) -> None:
    arrays = drawn((40, 60, 50), 5)
    kernels = native.kernels()
    before, found = kernels.threads(), []
    try:
        for count in (1, 2, 3):
            kernels.set_threads(count)
            found.append(results("native", arrays, 2))
    finally:
        kernels.set_threads(before)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_map_has_the_same_bits_in_any_batch() -> None:
    x, weight, bias = drawn((9, 9, 20), 7)
    with use_backend("native"):
        whole = depthwise_convolution(x, weight, bias)
        assert mx.array_equal(whole[1:], depthwise_convolution(x[1:], weight, bias))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    arrays = drawn((4, 5, 3), 3)

    def curvature(*given: mx.array) -> mx.array:
        def loss(*given: mx.array) -> mx.array:
            return depthwise_convolution(*given, stride=2).square().sum()

        return sum(g.square().sum() for g in mx.grad(loss, argnums=(0, 1, 2))(*given))

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature, argnums=(0, 1, 2))
            found.append([*mx.compile(second)(*arrays)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE
    batch = mx.stack([arrays[0], 2 * arrays[0]])
    with use_backend("native"):
        mapped = mx.vmap(depthwise_convolution, in_axes=(0, None, None))(batch, *arrays[1:])
        assert mx.array_equal(mapped[1], depthwise_convolution(batch[1], *arrays[1:]))


def test_what_is_refused() -> None:
    x, weight = mx.ones((1, 4, 4, 3)), mx.ones((3, 3, 3, 1))
    with pytest.raises(ValueError, match=r"k odd but got \(1, 4, 4, 3\) and \(3, 2, 2, 1\)"):
        depthwise_convolution(x, mx.ones((3, 2, 2, 1)))
    with pytest.raises(ValueError, match=r"'bias' must have shape \(3,\) but got \(4,\)"):
        depthwise_convolution(x, weight, mx.ones(4))
    with pytest.raises(ValueError, match="'stride' must be positive but got 0"):
        depthwise_convolution(x, weight, stride=0)
    kernel = native.kernels().depthwise_convolution
    for given, message in (
        ((x.astype(mx.int32), weight, None, 1), "'x' must be floats"),
        ((x, mx.ones((3, 3, 1, 1)), None, 1), "'weight' must be floats"),
        ((x, weight, mx.ones(4), 1), "'bias' must be floats"),
        ((x, weight, None, 0), "'stride' must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*given)

"""The compiled linear layer of ternary training, against its definition and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import Quantization, ternarize, ternary_linear, unpack_ternary, use_backend
from mlx_mmfree.ops.long_sums import long_mean, long_sum
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

KERNELS = native.kernels()
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
EPS = 0.1


def problem(rows: int, dims: int, outputs: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """Activations, a weight, the weight of a norm, and the gradient of the result."""
    mx.random.seed(rows + dims)
    x, weight = mx.random.normal((rows, dims)), mx.random.normal((outputs, dims)) * 0.02
    norm, d_y = 1 + 0.1 * mx.random.normal((dims,)), mx.random.normal((rows, outputs))
    return [x.astype(dtype), weight.astype(dtype), norm, d_y.astype(dtype)]


def results(backend: str, given: list[mx.array], has_norm: bool, **options: Any) -> list[mx.array]:
    """The result and the gradients of all that it is computed from."""
    *arrays, d_y = given if has_norm else [*given[:2], given[3]]
    eps = EPS if has_norm else None
    with use_backend(backend):
        values, gradients = mx.vjp(
            lambda *arrays: ternary_linear(*arrays, eps=eps, **options), arrays, [d_y]
        )
        mx.eval(values, gradients)
    return [*values, *gradients]


def exact(given: list[mx.array], has_norm: bool) -> list[np.ndarray]:
    """The definition and its straight-through gradients in float64."""
    x, weight, norm, d_y = (np.array(array, np.float64) for array in given)
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) if has_norm else np.ones(1)
    unit = x * inverse
    y = unit * norm if has_norm else x
    scale = 127 / np.maximum(np.abs(y).max(-1, keepdims=True), 1e-5)
    rounded = np.round(y * scale) / scale
    mean = max(np.abs(weight).mean(), 1e-5)
    ternary = np.clip(np.round(weight / mean), -1, 1) * mean
    d_weight, d_rounded = d_y.T @ rounded, d_y @ ternary
    if not has_norm:
        return [rounded @ ternary.T, d_rounded, d_weight]
    d_unit = d_rounded * norm
    d_x = inverse * (d_unit - unit * (d_unit * unit).mean(-1, keepdims=True))
    return [rounded @ ternary.T, d_x, d_weight, (d_rounded * unit).sum(0)]


@pytest.mark.parametrize("dims", [1, 31, 64, 300])
@pytest.mark.parametrize("has_norm", [True, False])
def test_equals_definition(dims: int, has_norm: bool, instructions: str) -> None:
    for dtype, rounding in zip(DTYPES, ("half_even", "half_away", "half_even"), strict=True):
        given = problem(7, dims, 33, dtype)
        options = {"quantization": Quantization(rounding)}
        got = results("native", given, has_norm, **options)
        widened = [array.astype(mx.float32) for array in given]
        want = results("reference", widened, has_norm, **options)
        assert [array.dtype for array in got] == [dtype, dtype, dtype, mx.float32][: len(got)]
        for own, other in zip(got, want, strict=True):
            assert relative_error(own, other) <= max(TOLERANCE[dtype], GRADIENT_TOLERANCE)


def off_boundaries(given: list[mx.array], has_norm: bool) -> list[mx.array]:
    """The same, but no number lies between two codes or trits, where float32 may choose either."""
    x, weight, norm, d_y = (np.array(array, np.float64) for array in given)
    factor = norm / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) if has_norm else np.ones(1)
    factor = factor * 127 / np.abs(x * factor).max(-1, keepdims=True)
    scaled = x * factor
    whole = np.floor(scaled)
    x = np.where(np.abs(scaled - whole - 0.5) < 0.02, (whole + 0.4) / factor, x)
    mean = np.abs(weight).mean()
    is_near = np.abs(np.abs(weight) / mean - 0.5) < 0.01
    weight = np.where(is_near, 0.45 * mean * np.sign(weight), weight)
    return [mx.array(array.astype(np.float32)) for array in (x, weight, norm, d_y)]


@pytest.mark.parametrize(
    ("dims", "outputs", "has_norm"),
    [pytest.param(2560, 11008, True, marks=pytest.mark.slow), (11008, 300, False)],
)
def test_equals_float64_at_the_sizes_of_models(dims: int, outputs: int, has_norm: bool) -> None:
    given = off_boundaries(problem(3, dims, outputs), has_norm)
    want = exact(given, has_norm)
    for got, other in zip(results("native", given, has_norm), want, strict=True):
        assert np.abs(np.array(got) - other).max() <= 2e-6 * np.abs(other).max()


def test_gradients_are_finite_differences_of_what_is_rounded() -> None:
    given = problem(2, 7, 5)
    x, weight, norm, d_y = (np.array(array, np.float64) for array in given)
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    y, mean = x * inverse * norm, np.abs(weight).mean()
    scale = 127 / np.abs(y).max(-1, keepdims=True)
    # what rounding adds is constant
    added = np.round(y * scale) / scale - y
    added_to_weight = np.clip(np.round(weight / mean), -1, 1) * mean - weight

    def loss(x: np.ndarray, weight: np.ndarray, norm: np.ndarray) -> float:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * norm
        return float((((y + added) @ (weight + added_to_weight).T) * d_y).sum())

    for number, got in enumerate(results("native", given, True)[1:]):
        for index in np.ndindex(got.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in (x, weight, norm)]
                moved[number][index] += step
                ends.append(loss(*moved))
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(np.array(got)[index] - slope) <= 2e-5 * max(1, abs(slope))


def test_threads_do_not_change_the_bits_of_kernels(instructions: str) -> None:
    x, weight, norm, _ = problem(300, 700, 300)
    before, found = KERNELS.threads(), []
    try:
        for count in (1, 2, 3):
            KERNELS.set_threads(count)
            sums = KERNELS.size_sums(weight)
            packed = KERNELS.pack_rounded(weight, mx.array([0.02]))
            values = KERNELS.unpack_scaled(packed, mx.array([0.02]), 700)
            found.append([sums, packed, values, KERNELS.rms_norm_round(x, norm, EPS, True)])
            mx.eval(found)
    finally:
        KERNELS.set_threads(before)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4097, 70_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_sizes_have_the_bits_of_long_sums(size: int, dtype: mx.Dtype) -> None:
    mx.random.seed(size)
    weight = mx.random.normal((size,)).astype(dtype)
    got = long_sum(KERNELS.size_sums(weight)) / size
    assert mx.array_equal(got, long_mean(mx.abs(weight.astype(mx.float32))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [1, 21, 64, 257])
def test_packed_trits_are_those_of_ternarize(dims: int, dtype: mx.Dtype) -> None:
    mx.random.seed(dims)
    weight = mx.random.normal((40, dims)).astype(dtype)
    trits, scale = ternarize(weight)
    packed = KERNELS.pack_rounded(weight, scale)
    assert mx.array_equal(unpack_ternary(packed, dims), trits)
    assert mx.array_equal(KERNELS.unpack_scaled(packed, scale, dims), trits * scale)


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    x, weight, norm, _ = problem(6, 9, 5)
    x = x.reshape(3, 2, 9)

    def curvature(*arrays: mx.array) -> mx.array:
        def loss(*arrays: mx.array) -> mx.array:
            return ternary_linear(*arrays, eps=EPS).square().sum()

        return sum(g.square().sum() for g in mx.grad(loss, argnums=(0, 1, 2))(*arrays))

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature, argnums=(0, 1, 2))
            mapped = mx.vmap(second, in_axes=(0, None, None))
            found.append([*mx.compile(second)(x, weight, norm), *mapped(x, weight, norm)])
            mx.eval(found)
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= GRADIENT_TOLERANCE


def stored_bytes(backend: str, x: mx.array, weight: mx.array, d_y: mx.array) -> int:
    """The memory that is taken between the two passes."""
    taken = []

    def forward(x: mx.array, weight: mx.array) -> mx.array:
        y = ternary_linear(x, weight)
        mx.eval(y)
        taken.append(mx.get_active_memory())
        return y

    before = mx.get_active_memory()
    with use_backend(backend):
        mx.eval(mx.vjp(forward, [x, weight], [d_y]))
    return taken[0] - before


def test_neither_codes_nor_trits_are_stored_as_floats() -> None:
    x, weight, _, d_y = problem(256, 512, 1024)
    mx.eval(x, weight, d_y)
    # the result and the packed trits
    least = d_y.nbytes + weight.nbytes // 16
    assert least <= stored_bytes("native", x, weight, d_y) <= least + 2**16
    assert stored_bytes("reference", x, weight, d_y) >= least + x.nbytes + weight.nbytes


def test_what_is_refused() -> None:
    x, weight = mx.ones((2, 3)), mx.ones((4, 3))
    with pytest.raises(ValueError, match=r"shapes \(..., D\) and \(N, D\) with D > 0 but got"):
        ternary_linear(x, mx.ones((4, 2)))
    with pytest.raises(ValueError, match="'norm' must have shape"):
        ternary_linear(x, weight, mx.ones(3))
    with pytest.raises(ValueError, match="'rounding' must be one of half_even, half_away"):
        ternary_linear(x, weight, quantization=Quantization("up"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'weight' must be floats"):
        KERNELS.pack_rounded(mx.ones((2, 3), mx.int32), mx.ones(1))
    with pytest.raises(ValueError, match="'scale' must be float32"):
        KERNELS.pack_rounded(weight, mx.ones(4))
    with pytest.raises(ValueError, match="'packed' must be uint32"):
        KERNELS.unpack_scaled(mx.zeros((4, 1), mx.uint32), mx.ones(1), 3)
    with pytest.raises(ValueError, match="'weight' must be floats"):
        KERNELS.size_sums(mx.ones(3, mx.int32))

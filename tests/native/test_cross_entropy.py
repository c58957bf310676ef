"""Cross-entropies and their gradients in single passes, against the definition and float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import cross_entropy, use_backend
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def results(
    backend: str, logits: mx.array, targets: mx.array, weight: mx.array
) -> tuple[mx.array, mx.array]:
    with use_backend(backend):
        losses = cross_entropy(logits, targets)
        gradient = mx.grad(lambda x: (cross_entropy(x, targets) * weight).sum())(logits)
        mx.eval(losses, gradient)
    return losses, gradient


def drawn(rows: int, classes: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(rows + classes)
    targets = mx.random.randint(0, classes, (2, rows))
    return 4 * mx.random.normal((2, rows, classes)), targets, mx.random.normal((2, rows))


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("classes", [1, 2, 15, 64, 1000, 2049, 5003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_definition(rows: int, classes: int, dtype: mx.Dtype) -> None:
    logits, targets, weight = drawn(rows, classes)
    logits = mx.contiguous(logits.swapaxes(0, 1)).swapaxes(0, 1).astype(dtype)
    losses, gradient = results("native", logits, targets, weight)
    want, want_gradient = results("reference", logits.astype(mx.float32), targets, weight)
    assert losses.dtype == mx.float32 and gradient.dtype == dtype
    if classes > 1:
        assert relative_error(losses, want) <= TOLERANCE[mx.float32]
        assert relative_error(gradient, want_gradient) <= TOLERANCE[dtype]
    else:
        assert not losses.any() and not gradient.any()


def test_equals_float64_over_a_vocabulary_of_128256() -> None:
    mx.random.seed(1)
    logits = mx.random.normal((3, 128256)) + 50
    targets = mx.array([0, 128255, -1])
    losses, gradient = results("native", logits, targets, mx.array([1.0, 2.0, -3.0]))
    exact = np.array(logits, np.float64)
    rows, classes = np.arange(3), np.array([0, 128255, 128255])
    total = np.exp(exact - 50).sum(axis=-1)
    want = np.log(total) + 50 - exact[rows, classes]
    assert np.abs(np.array(losses) - want).max() <= 4e-6
    shares = np.exp(exact - 50) / total[:, None]
    shares[rows, classes] -= 1
    shares *= np.array([1, 2, -3])[:, None]
    assert np.abs(np.array(gradient) - shares).max() <= 1e-6
    # each row adds up to nothing
    assert np.abs(np.array(gradient, np.float64).sum(axis=-1)).max() <= 2e-5


def test_gradient_is_finite_differences() -> None:
    logits, targets, weight = drawn(3, 9)
    exact, chosen = np.array(logits, np.float64), np.array(targets)[..., None]

    def loss(z: np.ndarray) -> float:
        losses = np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, chosen, -1)[..., 0]
        return float((losses * np.array(weight)).sum())

    _, gradient = results("native", logits, targets, weight)
    for index in np.ndindex(exact.shape):
        step = np.zeros_like(exact)
        step[index] = 1e-5
        slope = (loss(exact + step) - loss(exact - step)) / 2e-5
        assert abs(np.array(gradient)[index] - slope) <= 1e-5


def test_hidden_and_infinite_logits() -> None:
    logits = mx.array([[0.0, -mx.inf, 1.0], [mx.inf, 0.0, 1.0], [mx.nan, 0.0, 1.0]])
    losses, gradient = results("native", logits, mx.array([2, 1, 1]), mx.ones(3))
    assert mx.allclose(losses[0], mx.log(1 + mx.exp(mx.array(-1.0))))
    assert abs(gradient[0, 1].item()) < 1e-30
    assert mx.isnan(losses[1:]).all() and mx.isnan(gradient[2]).all()


@pytest.mark.parametrize("target", [5, -6, 2**31 - 1, -(2**31)])
def test_a_target_that_is_no_class_gives_nan(target: int) -> None:
    losses, gradient = results("native", mx.zeros((2, 5)), mx.array([1, target]), mx.ones(2))
    assert mx.isfinite(losses[0]) and mx.isfinite(gradient[0]).all()
    assert mx.isnan(losses[1]) and mx.isnan(gradient[1]).all()


def test_threads_and_rows_do_not_change_bits(threads: int, instructions: str) -> None:
    logits, targets, weight = drawn(40, 3000)
    whole = results("native", logits, targets, weight)
    alone = results("native", logits[1:, 7:9], targets[1:, 7:9], weight[1:, 7:9])
    assert all(mx.array_equal(a[1:, 7:9], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    logits, targets, _ = drawn(3, 11)

    def curvature(logits: mx.array, targets: mx.array) -> mx.array:
        return mx.grad(lambda x: cross_entropy(x, targets).square().sum())(logits).square().sum()

    found = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            second = mx.grad(curvature)
            found.append([mx.compile(second)(logits, targets), mx.vmap(second)(logits, targets)])
    for own, other in zip(*found, strict=True):
        assert relative_error(own, other) <= 1e-4


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \(..., V\) and \(...\) with V > 0 but got"):
        cross_entropy(mx.zeros((2, 3)), mx.zeros((3,), mx.int32))
    with pytest.raises(ValueError, match="with V > 0"):
        cross_entropy(mx.zeros((2, 0)), mx.zeros((2,), mx.int32))
    kernel = native.kernels().cross_entropy
    with pytest.raises(ValueError, match="'logits' must be floats"):
        kernel(mx.zeros((2, 3), mx.int32), mx.zeros((2,), mx.int32))
    with pytest.raises(ValueError, match="'targets' must be int32"):
        kernel(mx.zeros((2, 3)), mx.zeros((2,)))


def test_empty() -> None:
    logits, targets = mx.zeros((0, 3)), mx.zeros((0,), mx.int32)
    losses, gradient = results("native", logits, targets, mx.zeros((0,)))
    assert losses.shape == (0,) and gradient.shape == (0, 3)
    assert native.kernels().cross_entropy(logits, targets).shape == (0,)

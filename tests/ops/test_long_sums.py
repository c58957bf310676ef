"""Long sums against float64, at the sizes that models have."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops import (
    cross_entropy,
    layer_norm,
    log_softmax,
    logsumexp,
    long_cumsum,
    long_mean,
    long_sum,
    rms_norm,
    use_backend,
)

VOCABULARY = 128_256


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def log_softmax64(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4097, 2**20 + 7])
def test_sums_of_numbers_of_one_sign(size: int) -> None:
    x = np.abs(numbers(size))
    want = x.sum(dtype=np.float64)
    assert long_sum(mx.array(x)).item() == pytest.approx(want, rel=5e-7)
    rows = mx.array(np.stack([x, 2 * x]))
    got = long_sum(rows, axis=-1)
    assert np.array(got) == pytest.approx([want, 2 * want], rel=5e-7)
    columns = long_sum(mx.stack([rows.T, 3 * rows.T]), axis=-2)
    wanted = np.array([[want, 2 * want], [3 * want, 6 * want]])
    assert np.array(columns) == pytest.approx(wanted, rel=5e-7)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_sums_beyond_the_integers_of_float32(dtype: mx.Dtype) -> None:
    # one after another, ones add up to 2^24 at most
    x = mx.ones((10_240, 2_560), dtype)
    assert long_sum(x).item() == x.size
    assert long_mean(x).item() == 1.0


def test_a_sum_has_the_gradient_of_a_sum() -> None:
    x = mx.array(numbers(3, 130))
    gradient = mx.grad(lambda x: (long_sum(x, axis=-1) * mx.array([1.0, 2.0, 3.0])).sum())(x)
    assert mx.array_equal(gradient, mx.broadcast_to(mx.array([[1.0], [2.0], [3.0]]), x.shape))


@pytest.mark.parametrize("size", [1, 64, 100, 50_257, VOCABULARY])
@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0])
def test_running_sums(size: int, spread: float) -> None:
    p = np.exp(log_softmax64(spread * numbers(2, size))).astype(np.float32)
    want = np.cumsum(p, axis=-1, dtype=np.float64)
    assert np.abs(np.array(long_cumsum(mx.array(p))) - want).max() < 2e-6


@pytest.mark.parametrize("size", [40, 32_002, 50_257, VOCABULARY])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_probabilities_over_a_vocabulary(size: int, spread: float) -> None:
    logits = spread * numbers(2, size)
    want = log_softmax64(logits)
    assert np.abs(np.array(log_softmax(mx.array(logits))) - want).max() < 5e-6
    targets = np.array([0, size - 1])
    losses = np.array(cross_entropy(mx.array(logits), mx.array(targets)))
    assert np.abs(losses + want[np.arange(2), targets]).max() < 5e-6
    gradient = mx.grad(lambda x: cross_entropy(x, mx.array(targets)).sum())(mx.array(logits))
    want = np.exp(want)
    want[np.arange(2), targets] -= 1
    assert np.abs(np.array(gradient) - want).max() < 1e-6


def test_tokens_that_are_left_out_have_no_probability() -> None:
    logits = mx.full((1, 1000), -mx.inf)
    logits[0, 3] = 2.0
    assert logsumexp(logits).tolist() == [2.0]
    assert mx.exp(log_softmax(logits)).sum().item() == 1.0


def test_the_gradient_of_a_16_bit_loss_is_rounded_once() -> None:
    logits = mx.array([[8.0, 0.0]], mx.bfloat16)
    gradient = mx.grad(lambda x: cross_entropy(x, mx.array([0])).sum())(logits)
    assert gradient[0, 0].item() == pytest.approx(-3.3535e-4, rel=4e-3)


@pytest.mark.skipif(native.unavailable() is not None, reason="needs the compiled kernels")
def test_the_gradient_of_a_norms_weight_is_summed_over_many_rows() -> None:
    x = 1 + np.abs(numbers(2**18 + 7, 16))
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    signs = np.sign(centred)
    weight, bias = mx.ones(16), mx.zeros(16)
    with use_backend("native"):
        of_rms = mx.grad(lambda w: rms_norm(mx.array(x), w, eps=0.0).sum())(weight)
        of_layer = mx.grad(
            lambda w, b: (layer_norm(mx.array(x), w, b, eps=0.0) * mx.array(signs)).sum(),
            argnums=(0, 1),
        )(weight, bias)
    roots = [np.sqrt((rows**2).mean(axis=-1, keepdims=True)) for rows in (wide, centred)]
    assert np.array(of_rms) == pytest.approx((wide / roots[0]).sum(axis=0), rel=2e-7)
    want = (np.abs(centred) / roots[1]).sum(axis=0)
    assert np.array(of_layer[0]) == pytest.approx(want, rel=2e-7)
    assert np.array_equal(np.array(of_layer[1]), signs.sum(axis=0))

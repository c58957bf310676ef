"""The norm by batch statistics against float64, alone and fused with what stands before it."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.maps import Convolution, DepthwiseConvolution
from mlx_mmfree.layers.matrix import converted
from mlx_mmfree.layers.norms import BatchNorm
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def drawn(dims: int) -> BatchNorm:
    """A norm in evaluation, none of whose numbers is the one it begins with."""
    norm = BatchNorm(dims, eps=1e-3)
    norm.weight, norm.bias, norm.running_mean = mx.random.normal((3, dims))
    norm.running_var = mx.random.uniform(0.5, 2.0, (dims,))
    return norm.eval()


def normed(norm: BatchNorm, x: mx.array) -> mx.array:
    mean, var, weight, bias = (
        np.array(norm[name], np.float64)
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    y = (np.array(x, np.float64) - mean) / np.sqrt(var + 1e-3) * weight + bias
    return mx.array(y.astype(np.float32))


def test_evaluation_uses_the_running_statistics() -> None:
    norm, x = drawn(8), mx.random.normal((2, 5, 4, 8))
    assert relative_error(norm(x), normed(norm, x)) < TOLERANCE[mx.float32]


LINEARS = {
    "dense": lambda: nn.Linear(6, 8),
    "without bias": lambda: nn.Linear(6, 8, bias=False),
    "ternary": lambda: BitLinear(6, 8),
}


@pytest.mark.parametrize("made", LINEARS.values(), ids=LINEARS)
@pytest.mark.parametrize("rows", [3, 30])
def test_it_is_fused_with_a_linear(made: Callable[[], nn.Module], rows: int) -> None:
    linear, norm, x = made(), drawn(8), mx.random.normal((rows, 6))
    want = normed(norm, linear(x))
    assert relative_error(norm.of_linear(linear, x), want) < TOLERANCE[mx.float32]


CONVOLUTIONS = {
    "all channels": lambda **options: Convolution(8, 8, 3, stride=2, **options),
    "each channel": lambda **options: DepthwiseConvolution(8, 3, stride=2, **options),
}


@pytest.mark.parametrize("made", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(13, 10), (2, 2)])
def test_it_is_fused_with_a_convolution(
    made: Callable[..., nn.Module], bias: bool, size: tuple[int, int]
) -> None:
    norm = drawn(8)
    fused, alone = made(bias=bias, norm=norm).eval(), made(bias=bias).eval()
    fused.load_weights([(name, mx.random.normal(x.shape)) for name, x in _own(fused)], strict=False)
    alone.load_weights(_own(fused))
    x = mx.random.normal((2, *size, 8))
    assert relative_error(fused(x), normed(norm, alone(x))) < TOLERANCE[mx.float32]
    fused.train()
    alone_normed = BatchNorm(8, eps=1e-3)
    alone_normed.load_weights([(name, norm[name]) for name in ("weight", "bias")], strict=False)
    assert relative_error(fused(x), alone_normed(alone(x))) < TOLERANCE[mx.float32]


def _own(layer: nn.Module) -> list[tuple[str, mx.array]]:
    """Its parameters without its norm's."""
    return [(name, x) for name, x in tree_flatten(layer.parameters()) if "norm" not in name]


def test_training_follows_the_batch() -> None:
    # far from 0, where long sums of float32 would lose digits
    x = np.random.default_rng(0).normal(30.0, 0.1, (2, 112, 112, 24)).astype(np.float32)
    norm = BatchNorm(24, momentum=0.25)
    rows = x.reshape(-1, 24).astype(np.float64)
    want = (x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    got = norm(mx.array(x))
    # an input has a relative error of 3e-8 itself, 300 times as much once the mean is taken off
    assert np.abs(np.array(got) - want).max() < 1e-4
    assert np.allclose(np.array(norm.running_mean), 0.25 * rows.mean(0), rtol=1e-6)
    running = 0.75 + 0.25 * rows.var(0, ddof=1)
    assert np.allclose(np.array(norm.running_var), running, rtol=1e-6)
    assert norm.num_batches_tracked.item() == 1
    norm.eval()(mx.array(x))
    assert norm.num_batches_tracked.item() == 1


def test_the_running_variance_is_unbiased() -> None:
    x = np.random.default_rng(0).normal(1.0, 2.0, (1, 2, 2, 3)).astype(np.float32)
    norm = BatchNorm(3, momentum=0.25)
    for _ in range(2):
        norm(mx.array(x))
    # twice a quarter of the way
    want = 0.5625 + 0.4375 * x.reshape(4, 3).var(0, ddof=1)
    assert np.allclose(np.array(norm.running_var), want, rtol=1e-5)
    assert norm.num_batches_tracked.item() == 2


def test_the_gradient_of_the_scale_is_no_difference_of_large_sums() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(2.0, 1.0, (2, 112, 112, 16)).astype(np.float32) for _ in range(2))
    rows = x.reshape(-1, 16).astype(np.float64)
    normed = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)
    want = (normed * w.reshape(-1, 16)).sum(0)
    norm = BatchNorm(16)
    _, gradients = nn.value_and_grad(norm, lambda: (norm(mx.array(x)) * mx.array(w)).sum())()
    got = gradients["weight"]
    assert relative_error(got, mx.array(want.astype(np.float32))) < GRADIENT_TOLERANCE


def test_statistics_are_never_trained() -> None:
    norm = BatchNorm(4)
    norm.freeze()
    norm.unfreeze()
    assert sorted(norm.trainable_parameters()) == ["bias", "weight"]
    x, w = mx.random.normal((2, 6, 4))

    def loss() -> mx.array:
        return (norm(x) * w).sum()

    value, gradients = nn.value_and_grad(norm, loss)()
    mx.eval(value, norm.parameters(), gradients)
    assert norm.num_batches_tracked.item() == 1
    # a shift of the input, which the batch's mean takes away again, changes nothing
    gradient = mx.grad(lambda x: (norm(x) * w).sum())(x)
    assert mx.abs(gradient.sum(axis=0)).max().item() < 1e-5


def test_a_count_stays_whole() -> None:
    norm = converted(BatchNorm(4), mx.float16)
    assert norm.num_batches_tracked.dtype == mx.int64
    assert norm.weight.dtype == mx.float16


def test_one_number_of_a_channel_has_no_variance() -> None:
    norm = BatchNorm(4)
    with pytest.raises(ValueError, match=r"\[BatchNorm\] 'x' must have more than one number"):
        norm(mx.zeros((1, 1, 1, 4)))

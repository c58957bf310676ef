"""The causal depthwise convolution against its formula."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import ShortConvolution
from mlx_mmfree.layers.context import Context


def test_formula() -> None:
    convolution = ShortConvolution(6, 4)
    x = mx.random.normal((2, 9, 6), key=mx.random.key(0))
    y, _ = convolution(x, convolution.init_state(2, mx.float32))
    padded = np.pad(np.array(x), ((0, 0), (3, 0), (0, 0)))
    weight = np.array(convolution.weight)[:, 0]
    sums = np.stack([(padded[:, t : t + 4] * weight.T).sum(1) for t in range(9)], axis=1)
    assert np.allclose(np.array(y), sums / (1 + np.exp(-sums)), atol=1e-6)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_chunks_equal_the_whole(kernel_size: int) -> None:
    convolution = ShortConvolution(5, kernel_size)
    x = mx.random.normal((2, 7, 5), key=mx.random.key(1))
    state = convolution.init_state(2, mx.float32)
    whole, last = convolution(x, state)
    parts = []
    for chunk in mx.split(x, 7, axis=1):
        y, state = convolution(chunk, state)
        parts.append(y)
    assert mx.array_equal(mx.concatenate(parts, axis=1), whole)
    assert mx.array_equal(state, last)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_a_new_sample_sees_zeros_before_it(kernel_size: int) -> None:
    convolution = ShortConvolution(5, kernel_size)
    x = mx.random.normal((1, 9, 5), key=mx.random.key(1))
    carried = mx.random.normal((1, kernel_size - 1, 5), key=mx.random.key(2))
    starts = mx.array([[t in (2, 7) for t in range(9)]])
    y, state = convolution(x, carried, Context(starts=starts))
    parts, last = [], carried
    for chunk in mx.split(x, [2, 7], axis=1):
        part, last = convolution(chunk, last)
        parts.append(part)
        last_of_row, last = last, mx.zeros_like(last)
    assert mx.array_equal(y, mx.concatenate(parts, axis=1))
    assert mx.array_equal(state, last_of_row)


@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_padding_is_passed_over(kernel_size: int, length: int, has_starts: bool) -> None:
    rows = 16
    draw = np.random.default_rng(kernel_size + length)
    convolution = ShortConvolution(5, kernel_size)
    x = draw.normal(size=(rows, length, 5)).astype(np.float32)
    carried = draw.normal(size=(rows, kernel_size - 1, 5)).astype(np.float32)
    valid, starts = draw.random((rows, length)) < 0.6, draw.random((rows, length)) < 0.3
    valid[0] = False
    # what begins at padding begins nothing
    context = Context(mx.array(valid), starts=mx.array(starts) if has_starts else None)
    y, state = convolution(mx.array(x), mx.array(carried), context)
    for row in range(rows):
        last = mx.array(carried[row : row + 1])
        for position in range(length):
            if not valid[row, position]:
                assert not y[row, position].any().item()
                continue
            if has_starts and starts[row, position]:
                last = mx.zeros_like(last)
            part, last = convolution(mx.array(x[row : row + 1, position : position + 1]), last)
            assert mx.array_equal(y[row, position], part[0, 0])
        assert mx.array_equal(state[row], last[0])


def test_kernel_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="'kernel_size' must be positive but got 0"):
        ShortConvolution(4, 0)

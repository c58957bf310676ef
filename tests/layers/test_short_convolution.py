"""The causal depthwise convolution against its formula."""

import mlx.core as mx
import mlx.nn as nn
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
    want = np.stack([(padded[:, t : t + 4] * weight.T).sum(1) for t in range(9)], axis=1)
    assert mx.allclose(y, nn.silu(mx.array(want)), atol=1e-6)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_pieces_equal_the_whole(kernel_size: int) -> None:
    convolution = ShortConvolution(5, kernel_size)
    x = mx.random.normal((2, 7, 5), key=mx.random.key(1))
    state = convolution.init_state(2, mx.float32)
    whole, last = convolution(x, state)
    parts = []
    for piece in mx.split(x, 7, axis=1):
        y, state = convolution(piece, state)
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
    for piece in mx.split(x, [2, 7], axis=1):
        part, last = convolution(piece, last)
        parts.append(part)
        last_of_row, last = last, mx.zeros_like(last)
    assert mx.array_equal(y, mx.concatenate(parts, axis=1))
    assert mx.array_equal(state, last_of_row)


def test_kernel_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="'kernel_size' must be positive but got 0"):
        ShortConvolution(4, 0)

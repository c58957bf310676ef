"""FNet: against NumPy in float64, with and without padding."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.token_mixers import FNet
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.parametrize("length", [1, 63, 100, 512])
def test_the_transform_of_numpy(length: int) -> None:
    x = mx.random.normal((2, length, 48), key=mx.random.key(1))
    want = mx.array(np.fft.fft2(np.array(x, np.float64)).real)
    assert relative_error(FNet(48)(x)[0], want) <= TOLERANCE[mx.float32]
    valid = mx.ones((2, length), mx.bool_)
    assert relative_error(FNet(48)(x, None, valid)[0], want) <= TOLERANCE[mx.float32]


def test_rows_of_different_lengths() -> None:
    x = mx.random.normal((3, 9, 8), key=mx.random.key(2))
    valid = mx.array([[1] * 5 + [0] * 4, [0, 1, 1, 0, 0, 1, 1, 1, 1], [0] * 9], mx.bool_)
    y, _ = FNet(8)(x, None, valid)
    for row in range(3):
        chosen = np.array(valid)[row]
        assert not np.array(y)[row, ~chosen].any()
        if chosen.any():
            want = np.fft.fft2(np.array(x, np.float64)[row, chosen]).real
            got = mx.array(np.array(y)[row, chosen])
            assert relative_error(got, mx.array(want)) <= TOLERANCE[mx.float32]

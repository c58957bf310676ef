"""Codes of positions that are added to embedded tokens."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers.attention.positions import (
    AddedPositions,
    LearnedPositions,
    SinusoidalPositions,
)
from mlx_mmfree.layers.context import Context
from tests.tolerances import TOLERANCE, relative_error


def test_sines_at_users_sizes() -> None:
    """Positions up to 8,192 in 512 dims, against float64."""
    positions, i = np.arange(8192)[:, None], np.arange(256)
    angles = positions * 10000.0 ** (-2 * i / 512)
    want = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(8192, 512)
    got = SinusoidalPositions(512)(mx.arange(8192))
    # an angle of 8,192 has a spacing of 1e-3 in float32
    assert relative_error(got, mx.array(want.astype(np.float32))) <= TOLERANCE[mx.float32]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="'dims' must be even but got 5"):
        SinusoidalPositions(5)
    with pytest.raises(ValueError, match="'layout' must be one of 'interleaved', 'concatenated'"):
        SinusoidalPositions(4, layout="other")


def test_a_position_without_a_row_is_nan() -> None:
    codes = LearnedPositions(4, max_length=3, offset=2)
    assert codes.rows.weight.shape == (5, 4)
    y = codes(mx.array([[0, 2, 3]]))
    assert mx.array_equal(y[0, :2], codes.rows.weight[mx.array([2, 4])])
    assert mx.isnan(y[0, 2]).all()


def test_positions_are_counted_on() -> None:
    """Over calls, past padding, and from 0 in each sample of a row."""
    code = SinusoidalPositions(8)
    layer, x = AddedPositions(8, code), mx.zeros((2, 6, 8))
    valid = mx.array([[False, False, True, True, True, True], [True] * 6])
    starts = mx.array([[False] * 4 + [True, False], [False] * 6])
    y, state = layer(x, None, valid, starts=starts)
    assert mx.array_equal(y[0, 2:], code(mx.array([0, 1, 0, 1])))
    assert mx.array_equal(y[1], code(mx.arange(6)))
    assert state.read.tolist() == [2, 6]
    more, state = layer.added(x[:, :1] + 1, state, Context())
    assert mx.array_equal(more[:, 0], code(mx.array([2, 6])) + 1)
    assert state.read.tolist() == [3, 7]

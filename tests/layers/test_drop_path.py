"""Layers of residual branches."""

import mlx.core as mx
import pytest

from mlx_mmfree.layers.maps import DropPath, LayerScale


def test_whole_samples_are_left_out_in_training_alone() -> None:
    mx.random.seed(0)
    layer, x = DropPath(0.25), mx.ones((400, 3, 2))
    y = layer(x)
    first = y[:, :1, :1]
    assert mx.array_equal(y, mx.broadcast_to(first, y.shape))
    assert sorted(set(first.reshape(-1).tolist())) == [0.0, pytest.approx(4 / 3)]
    assert 0.9 < y.mean().item() < 1.1
    assert mx.array_equal(layer.eval()(x), x)


def test_nothing_is_left_out_at_rate_0() -> None:
    x = mx.ones((4, 2))
    assert mx.array_equal(DropPath(0.0)(x), x)
    with pytest.raises(ValueError, match=r"\[DropPath\] 'rate' must be from 0 to below 1"):
        DropPath(1.0)


def test_each_channel_has_a_factor() -> None:
    layer = LayerScale(3, 0.5)
    layer.weight = mx.array([0.5, 2.0, -1.0])
    y = layer(mx.ones((2, 4, 4, 3), mx.float16))
    assert y.dtype == mx.float16
    assert mx.array_equal(y[0, 0, 0], layer.weight)

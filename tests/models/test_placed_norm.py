"""The norm with a gain for each position."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.layers.norms import PlacedRMSNorm
from tests.tolerances import TOLERANCE, relative_error


def test_equal_gains_make_the_plain_norm() -> None:
    norm, plain = PlacedRMSNorm(8, max_length=5, eps=1e-5), nn.RMSNorm(8, eps=1e-5)
    x = mx.random.normal((2, 4, 8), key=mx.random.key(1))
    assert relative_error(norm(x), plain(x)) <= TOLERANCE[mx.float32]
    norm.weight = mx.arange(5.0)[:, None] * mx.ones((1, 8))
    want = plain(x) * mx.arange(4.0)[:, None]
    assert relative_error(norm(x), want) <= TOLERANCE[mx.float32]
    assert norm(x.astype(mx.float16)).dtype == mx.float16


@pytest.mark.parametrize("shape", [(1, 6, 8), (1, 0, 8), (8,)])
def test_what_has_no_position_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be a sequence of 1 to 5 positions"):
        PlacedRMSNorm(8, max_length=5)(mx.ones(shape))

"""Sinusoidal positions."""

import mlx.core as mx
import pytest

from mlx_mmfree.layers.attention.positions import SinusoidalPositions
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


@golden("sinusoidal_positions__both_layouts")
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
def test_sinusoidal_positions(file: GoldenFile, layout: str) -> None:
    codes = SinusoidalPositions(file.hyper["dim"], base=file.hyper["base"], layout=layout)
    assert_close(codes(mx.arange(file.hyper["num_positions"])), file.out[layout])

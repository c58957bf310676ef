"""Norms and blocks of maps against float64 at the sizes of real models."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.maps import DepthwiseBlock, DepthwiseConvolution, LayerScale, pointwise
from mlx_mmfree.models.efficientvit import InvertedBottleneck
from mlx_mmfree.models.poolformer import MapNorm
from tests.tolerances import TOLERANCE, relative_error


def test_the_norm_of_a_map_adds_up_long_sums() -> None:
    # a mean that is large beside the deviation: one by one, 200,704 numbers would lose digits of it
    x = np.random.default_rng(0).normal(10.0, 0.5, (2, 56, 56, 64)).astype(np.float32)
    norm = MapNorm(64)
    norm.weight, norm.bias = mx.random.normal((2, 64))
    whole = x.astype(np.float64).reshape(2, -1)
    mean, var = (each[:, None, None, None] for each in (whole.mean(-1), whole.var(-1)))
    want = (x - mean) / np.sqrt(var + 1e-5) * np.array(norm.weight) + np.array(norm.bias)
    want = mx.array(want.astype(np.float32))
    assert relative_error(norm(mx.array(x)), want) < TOLERANCE[mx.float32]
    half = norm(mx.array(x).astype(mx.bfloat16))
    assert half.dtype == mx.bfloat16
    assert relative_error(half, want) < TOLERANCE[mx.bfloat16]


def test_projections_of_positions_may_be_ternary() -> None:
    mixer = FeedForward(8, linear=pointwise(BitLinear))
    assert isinstance(mixer.up_proj.linear, BitLinear)
    x = mx.random.normal((2, 5, 4, 8))
    want = mixer.down_proj.linear(mx.maximum(mixer.up_proj.linear(x), 0))
    assert mx.array_equal(mixer(x), want)


def test_a_branch_of_zeros_leaves_the_map() -> None:
    block = DepthwiseBlock(DepthwiseConvolution(8, 3), FeedForward(8), scale=LayerScale(8, 0.0))
    x = mx.random.normal((2, 5, 4, 8))
    assert mx.array_equal(block(x), x)
    dropping = DepthwiseBlock(DepthwiseConvolution(8, 3), FeedForward(8), drop_path=0.999)
    assert mx.array_equal(dropping(x), x)
    assert not mx.array_equal(dropping.eval()(x), x)


def test_a_bottleneck_adds_its_input_where_it_can() -> None:
    plain = InvertedBottleneck(8, 8, hidden_dims=16).eval()
    added = InvertedBottleneck(8, 8, hidden_dims=16, is_residual=True).eval()
    added.update(plain.parameters())
    x = mx.random.normal((2, 5, 4, 8))
    assert mx.allclose(added(x), x + plain(x), atol=1e-6)
    for arguments in ({"output_dims": 4}, {"output_dims": 8, "stride": 2}):
        with pytest.raises(ValueError, match=r"\[InvertedBottleneck\] 'is_residual' must be False"):
            InvertedBottleneck(8, is_residual=True, **arguments)


@pytest.mark.parametrize("has_inner_norms", [True, False])
def test_norms_of_a_bottleneck_have_biases_in_place(has_inner_norms: bool) -> None:
    block = InvertedBottleneck(8, 8, hidden_dims=16, has_inner_norms=has_inner_norms)
    for inner in (block.up_proj, block.convolution):
        assert ("norm" in inner) == has_inner_norms
    assert ("bias" in block.convolution) != has_inner_norms
    assert ("bias" in block.up_proj.linear) != has_inner_norms
    assert "norm" in block.down_proj and "bias" not in block.down_proj.linear

"""Layers of maps against MLX's own convolutions, and against NumPy at the sizes of real models."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.maps import Convolution, DepthwiseConvolution, gather_windows
from mlx_mmfree.layers.matrix import stored_layouts
from mlx_mmfree.models.edgenext import FourierPositions, SplitConvolution
from mlx_mmfree.models.swin import PatchMerging
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.parametrize(
    ("side", "stride", "padding"), [(3, 2, None), (4, 4, None), (1, 1, None), (7, 2, 3), (2, 2, 0)]
)
def test_convolution_is_that_of_mlx(side: int, stride: int, padding: int | None) -> None:
    layer = Convolution(3, 8, side, stride=stride, padding=padding)
    layer.linear.bias = mx.random.normal((8,))
    x = mx.random.normal((2, 13, 10, 3))
    on_disk = stored_layouts(layer)["linear.weight"].write(layer.linear.weight)
    assert on_disk.shape == (8, 3, side, side)
    default = 0 if side == stride else side // 2
    zeros = default if padding is None else padding
    want = mx.conv2d(x, mx.moveaxis(on_disk, 1, -1), stride=stride, padding=zeros)
    assert relative_error(layer(x), want + layer.linear.bias) < TOLERANCE[mx.float32]


def test_layouts_are_read_back() -> None:
    layers = (Convolution(5, 8, 3), DepthwiseConvolution(6, 5))
    for layer in layers:
        for name, layout in stored_layouts(layer).items():
            weight = layer.linear.weight if name == "linear.weight" else layer.weight
            stored = layout.write(weight)
            assert stored.shape == layout.shape
            assert mx.array_equal(layout.read(stored), weight)


@pytest.mark.parametrize(("side", "stride"), [(1, 2), (2, 2), (3, 1), (3, 2), (4, 4), (2, 3)])
@pytest.mark.parametrize("size", [(4, 5), (7, 9), (8, 8)])
def test_windows_and_their_gradient_are_those_of_numpy(
    side: int, stride: int, size: tuple[int, int]
) -> None:
    # a map whose rows lie apart in memory
    x = mx.random.normal((2, size[1], size[0], 3)).swapaxes(1, 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(x), (side, side), axis=(1, 2))
    want = np.moveaxis(windows[:, ::stride, ::stride], 3, -1)
    got = gather_windows(x, side, stride)
    assert np.array_equal(np.array(got), want.reshape(got.shape))
    weights = np.random.default_rng(0).normal(size=want.shape).astype(np.float32)
    gradient = mx.grad(
        lambda x: (gather_windows(x, side, stride) * mx.array(weights.reshape(got.shape))).sum()
    )(x)
    exact = np.zeros(x.shape)
    for row, column in np.ndindex(*want.shape[1:3]):
        above, beside = row * stride, column * stride
        exact[:, above : above + side, beside : beside + side] += weights[:, row, column]
    assert np.abs(np.array(gradient) - exact).max() <= 1e-5


def test_a_convolution_may_be_ternary() -> None:
    layer = Convolution(4, 8, 3, stride=2, linear=BitLinear)
    assert isinstance(layer.linear, BitLinear)
    assert layer(mx.random.normal((1, 6, 5, 4))).shape == (1, 3, 3, 8)


def test_a_map_smaller_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[Convolution\] 'x' must be at least 4 positions high"):
        Convolution(3, 8, 4, stride=4)(mx.zeros((1, 3, 9, 3)))
    with pytest.raises(ValueError, match=r"\[DepthwiseConvolution\] 'kernel_size' must be odd"):
        DepthwiseConvolution(8, 4)
    with pytest.raises(ValueError, match=r"\[SplitConvolution\] 'num_convolutions' must leave"):
        SplitConvolution(4, 4)
    with pytest.raises(ValueError, match=r"\[FourierPositions\] 'num_features' must be even"):
        FourierPositions(8, num_features=5)


def test_a_depthwise_convolution_of_a_real_size() -> None:
    layer = DepthwiseConvolution(96, 7)
    x = mx.random.normal((1, 56, 56, 96))
    padded = np.pad(np.array(x, np.float64)[0], ((3, 3), (3, 3), (0, 0)))
    weight = np.array(layer.weight, np.float64)[..., 0]
    want = np.zeros((56, 56, 96))
    for row in range(7):
        for column in range(7):
            want += weight[:, row, column] * padded[row : row + 56, column : column + 56]
    got = layer(x)
    assert relative_error(got, mx.array(want[None].astype(np.float32))) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("size", [(8, 8), (7, 6), (1, 5)])
def test_a_depthwise_convolution_with_a_stride(size: tuple[int, int]) -> None:
    apart, together = (DepthwiseConvolution(8, 5, stride=stride) for stride in (2, 1))
    together.update(apart.parameters())
    x = mx.random.normal((2, *size, 8))
    want = together(x)[:, ::2, ::2]
    assert relative_error(apart(x), want) < TOLERANCE[mx.float32]


def test_merging_pads_odd_maps() -> None:
    merging = PatchMerging(4)
    x = mx.random.normal((1, 5, 3, 4))
    whole = mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])
    assert mx.array_equal(merging(x), merging(whole))

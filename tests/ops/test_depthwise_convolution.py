"""Depthwise convolutions on Metal: values at every edge of a map, and how much memory is read."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops import depthwise_convolution, use_backend
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import check_depthwise
from tests.ops.planting import Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error

# a single position, maps smaller than the window, more tiles than a threadgroup has, and a part of one
MAPS = [(1, 1, 3), (2, 3, 33), (9, 17, 40)]


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [3, 5, 7, 11])
@pytest.mark.parametrize("map_", MAPS, ids=str)
def test_on_metal(metal: None, map_: tuple[int, int, int], side: int, stride: int) -> None:
    check_depthwise(map_, side, stride)


@pytest.mark.metal
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_other_dtypes_on_metal(metal: None, dtype: mx.Dtype) -> None:
    check_depthwise((5, 6, 33), 3, 1, dtype)


@pytest.mark.metal
@pytest.mark.parametrize("stride", [1, 2])
def test_a_tile_reads_each_position_once(emulated: Emulator, stride: int) -> None:
    # one row of two tiles of four positions, in the middle of which the window is whole
    x, weight = mx.random.normal((1, 1, 8 * stride, 32)), mx.random.normal((32, 3, 3, 1))
    with use_backend("metal"):
        depthwise_convolution(x, weight, mx.zeros((32,)), stride=stride)
    record = emulated.records[-1]
    # a tile reads the position before its first one too; with steps of one position, the one after its
    # last one too, and the map has none before the first tile and after the last
    positions = 2 * (4 + 1) if stride == 1 else 2 * (8 + 1) - 1
    assert record.loaded["x"] == positions * 32 * 4
    assert record.loaded["weight"] == weight.nbytes
    assert record.stored["y"] == 8 * 32 * 4


@pytest.mark.metal
def test_a_window_too_large_for_metal_is_computed_elsewhere(metal: None) -> None:
    x, weight = mx.random.normal((1, 3, 3, 2)), mx.random.normal((2, 17, 17, 1))
    with use_backend("reference"):
        want = depthwise_convolution(x, weight)
    assert relative_error(depthwise_convolution(x, weight), want) <= TOLERANCE[mx.float32]


def small() -> None:
    check_depthwise((3, 6, 40), 5, 1)


def apart() -> None:
    check_depthwise((5, 11, 40), 3, 2)


FAULTS = {
    "rows beyond the map": Fault(small, "above < 0 || above >= height", "above < 0", 0),
    "columns beyond the map": Fault(small, "beside < 0 || beside >= width", "beside >= width", 0),
    "window of the next position": Fault(small, "p - t * STRIDE", "p - (t + 1) * STRIDE", 0),
    "step left out": Fault(apart, "column * STRIDE + p", "column + p", 0),
    "row of another step": Fault(apart, "row * STRIDE + u", "row + u", 0),
    "weights of another channel": Fault(small, "(lane * SIDE + u)", "(u * SIDE + u)", 0),
    "weights turned": Fault(small, "* SIDE + v]", "* SIDE + SIDE - 1 - v]", 0),
    "missing barrier": Fault(small, "threadgroup_barrier(mem_flags::mem_threadgroup);", "", 0),
    "positions beyond the row": Fault(small, "t < columns - column", "true", 0),
    "channels beyond the last": Fault(small, " || channel >= dims", "", 0),
    "weights of the next channels": Fault(small, "min(32, dims - block)", "32", 0),
    "bias left out": Fault(small, "static_cast<float>(bias[channel])", "0.0f", 0),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(
    name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_seen(FAULTS[name], "depthwise_convolution", emulated, monkeypatch)

"""Ternarisation and the packed layout."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import (
    pack_ternary,
    packed_columns,
    packed_width,
    ternarize,
    ternarize_packed,
    ternary_matmul,
    unpack_ternary,
)
from mlx_mmfree.ops.host_blocks import all_finite

SIZES = [1, 16, 31, 32, 33, 63, 100, 5460]


@pytest.mark.parametrize("input_dims", SIZES)
def test_packing_is_lossless(input_dims: int) -> None:
    trits = np.random.default_rng(input_dims).integers(-1, 2, (5, input_dims))
    packed = pack_ternary(mx.array(trits))
    assert packed.dtype == mx.uint32
    assert packed.shape == (5, packed_width(input_dims))
    assert np.array_equal(np.array(unpack_ternary(packed, input_dims)), trits)


def test_packed_words_are_the_stated_layout() -> None:
    trits = np.array([[1, -1, 0] + [0] * 13 + [-1] + [1] * 3])
    codes = np.full(32, 1)
    codes[:20] = trits[0] + 1
    words = [sum(int(c) << 2 * n for n, c in enumerate(codes[w : w + 16])) for w in (0, 16)]
    assert np.array(pack_ternary(mx.array(trits))).tolist() == [words]


@pytest.mark.parametrize(("group_size", "input_dims"), [(32, 96), (64, 128), (128, 256)])
def test_layout_is_that_of_quantized_matmul(group_size: int, input_dims: int) -> None:
    mx.random.seed(0)
    weight = mx.random.normal((8, input_dims))
    trits, scale = ternarize(weight)
    packed = pack_ternary(trits)
    scales = mx.broadcast_to(scale, (8, input_dims // group_size))
    dense = mx.dequantize(packed, scales, -scales, group_size=group_size, bits=2)
    assert mx.array_equal(dense, trits * scale)


def test_ternarize_is_the_published_formula() -> None:
    weight = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
    trits, scale = ternarize(mx.array(weight))
    mean = np.abs(weight).mean()
    assert scale.shape == (1,)
    assert scale.item() == pytest.approx(mean, rel=1e-6)
    assert np.array_equal(np.array(trits), np.clip(np.round(weight / mean), -1, 1))


def test_ternarize_rounds_ties_to_even_and_bounds_the_scale() -> None:
    trits, scale = ternarize(mx.array([[0.5, -0.5, 1.5, -1.5]]))
    assert (trits.tolist(), scale.item()) == ([[0, 0, 1, -1]], 1.0)
    trits, scale = ternarize(mx.zeros((2, 2)))
    assert scale.item() == pytest.approx(1e-5)
    assert not trits.any().item()


def test_sums_of_codes_are_exact_for_any_number_of_rows() -> None:
    random = np.random.default_rng(1)
    codes = random.integers(-128, 128, (200, 5460))
    trits = random.integers(-1, 2, (17, 5460))
    packed = pack_ternary(mx.array(trits))
    want = codes @ trits.T
    for rows in (1, 7, 200):
        got = ternary_matmul(mx.array(codes[:rows], mx.float32), packed)
        assert np.array_equal(np.array(got), want[:rows])


def test_wrong_arguments_are_named() -> None:
    packed = pack_ternary(mx.zeros((2, 64)))
    with pytest.raises(ValueError, match="2 words a row for 32 inputs but got 4"):
        ternary_matmul(mx.ones((1, 32)), packed)
    with pytest.raises(ValueError, match="'weight' must be a uint32 matrix"):
        ternary_matmul(mx.ones((1, 64)), packed.astype(mx.int32))


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (64, 128), (20, 41), (32, 140), (16, 80)])
def test_packed_columns(start: int, stop: int) -> None:
    trits = mx.random.randint(-1, 2, (5, 140))
    columns = packed_columns(pack_ternary(trits), 140, start, stop)
    assert mx.array_equal(columns, pack_ternary(trits[:, start:stop]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("times", "rows", "columns"), [(125, 256, 2_560), (27, 256, 2_560), (32, 96, 8_192)]
)
def test_ternarize_at_the_sizes_of_models(
    times: int, rows: int, columns: int, dtype: mx.Dtype
) -> None:
    """Matrices of 32,000 x 2,560, 6,912 x 2,560 and 3,072 x 8,192: one block, many times."""
    mx.random.seed(times)
    block = mx.random.normal((rows, columns), dtype=dtype, scale=0.02)
    trits, scale = ternarize(mx.tile(block, (times, 1)))
    weight = np.asarray(block.astype(mx.float32)).astype(np.float64)
    mean = np.abs(weight).mean()
    assert scale.item() == pytest.approx(mean, rel=1e-6)
    want = np.clip(np.round(weight / mean), -1, 1)
    # the scale's rounding may move weights of half its size, and no others
    is_at_boundary = np.abs(np.abs(weight) / mean - 0.5) < 1e-6
    is_right = (trits.reshape(times, rows, columns) == mx.array(want, mx.float32)).all(axis=0)
    assert np.all(np.asarray(is_right) | is_at_boundary)
    assert is_at_boundary.mean() < 1e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 21), (5, 100), (129, 64), (300, 2_560), (7, 70_001)], ids=str
)
def test_packing_at_once_gives_the_same_bits(shape: tuple[int, int], dtype: mx.Dtype) -> None:
    mx.random.seed(shape[1])
    weight = mx.random.normal(shape, dtype=dtype, scale=0.02)
    # ties and signed zeros
    weight = mx.where(mx.random.uniform(shape=shape) < 0.1, mx.array(-0.0, dtype), weight)
    trits, want_scale = ternarize(weight)
    words, scale = ternarize_packed(weight)
    assert mx.array_equal(scale, want_scale) and scale.shape == (1,)
    assert mx.array_equal(words, pack_ternary(trits))


def test_packing_at_once_rounds_ties_to_zero() -> None:
    weight = mx.array([[0.5, -0.5, 1.5, -1.5]])
    words, scale = ternarize_packed(weight)
    assert scale.item() == 1.0
    assert unpack_ternary(words, 4).tolist() == [[0, 0, 1, -1]]


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_packing_at_once_shows_what_is_not_finite_in_the_scale(value: float) -> None:
    weight = mx.ones((4, 100))
    weight[3, 99] = value
    _, scale = ternarize_packed(weight)
    assert not mx.isfinite(scale).item()


@pytest.mark.parametrize("index", [0, 70_000, 139_999])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_whether_all_numbers_are_finite(dtype: mx.Dtype, index: int) -> None:
    array = mx.full((140_000,), mx.finfo(dtype).max, dtype)
    array[index] = -array[index]
    assert all_finite(array.reshape(2, -1)) and all_finite(array[:0])
    for value in (mx.nan, mx.inf, -mx.inf):
        array[index] = value
        assert not all_finite(array.reshape(2, -1))


def test_whole_numbers_are_finite() -> None:
    assert all_finite(mx.array([2**32 - 1, 0], mx.uint32))

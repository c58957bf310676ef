"""Rotary embedding: relative positions, scalings, what is refused."""

import math

import mlx.core as mx
import pytest

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.rope import (
    dynamic_wavelengths,
    linear_wavelengths,
    llama3_wavelengths,
    rope_wavelengths,
)
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_products_depend_on_the_distance_only(is_interleaved: bool) -> None:
    rope = RoPE(8, is_interleaved=is_interleaved)
    q, k = mx.random.normal((2, 1, 1, 1, 8))

    def product(query: int, key: int) -> float:
        return (rope(q, query) * rope(k, key)).sum().item()

    assert math.isclose(product(7, 3), product(104, 100), rel_tol=1e-3, abs_tol=1e-4)
    assert not math.isclose(product(7, 3), product(7, 5), rel_tol=1e-3)


def test_each_row_has_its_own_offset() -> None:
    rope = RoPE(8)
    x = mx.random.normal((2, 3, 4, 8))
    y = rope(x, mx.array([0, 9]))
    assert relative_error(y[:1], rope(x[:1])) <= FLOAT32
    assert relative_error(y[1:], rope(x[1:], 9)) <= FLOAT32


def test_linear_scaling_divides_positions() -> None:
    x = mx.random.normal((1, 1, 1, 8))
    stretched = RoPE(8, wavelengths=linear_wavelengths(rope_wavelengths(8), 4.0))
    assert relative_error(stretched(x, 12), RoPE(8)(x, 3)) <= FLOAT32


def test_dynamic_scaling_begins_after_the_trained_length() -> None:
    plain = rope_wavelengths(8, 500.0)
    for length in (1, 64):
        same = dynamic_wavelengths(8, 500.0, factor=2.0, trained_length=64, length=length)
        assert mx.array_equal(same, plain)
    longer = dynamic_wavelengths(8, 500.0, factor=2.0, trained_length=64, length=128)
    # 2 * 128 / 64 - 1 = 3
    assert relative_error(longer, rope_wavelengths(8, 500.0 * 3 ** (8 / 6))) <= FLOAT32


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    options = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "trained_length": 64}
    waves = mx.array([1.0, 16, 17, 63, 65, 1e4]) / (2 * math.pi)
    stretch = llama3_wavelengths(waves, factor=8.0, **options) / waves
    assert relative_error(stretch[:2], mx.ones(2)) <= FLOAT32
    assert relative_error(stretch[4:], 8 * mx.ones(2)) <= FLOAT32
    assert 1 < stretch[2].item() < stretch[3].item() < 8


@pytest.mark.parametrize("dims", [0, -2, 7])
def test_dims_come_in_pairs(dims: int) -> None:
    with pytest.raises(ValueError, match=r"\[RoPE\] 'dims' must be even and positive"):
        RoPE(dims)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_dtype_is_kept(dtype: mx.Dtype) -> None:
    assert RoPE(8)(mx.ones((1, 1, 2, 8), dtype), mx.array([3])).dtype == dtype


def test_has_no_parameters() -> None:
    assert RoPE(8).parameters() == {}

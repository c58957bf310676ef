"""Rotary embedding: relative positions, scalings, what is refused."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import DynamicRoPE, RoPE
from mlx_mmfree.layers.attention.positions import (
    dynamic_wavelengths,
    linear_wavelengths,
    llama3_wavelengths,
    rope_wavelengths,
    yarn_attention_factor,
    yarn_wavelengths,
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


@pytest.mark.parametrize(
    "rope", [RoPE(8, is_interleaved=True), DynamicRoPE(8, factor=4.0, trained_length=2)]
)
def test_each_token_has_its_own_offset(rope: RoPE) -> None:
    x = mx.random.normal((2, 3, 4, 8))
    y = rope(x, mx.array([[0, 1, 0, 1], [7, 8, 9, 0]]))
    assert relative_error(y[0, :, 2:], rope(x[:1, :, 2:])[0]) <= FLOAT32
    assert relative_error(y[1, :, :3], rope(x[1:, :, :3], 7)[0]) <= FLOAT32
    assert relative_error(y[1, :, 3:], rope(x[1:, :, 3:])[0]) <= FLOAT32


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


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_dynamic_scaling_rotates_each_position_with_the_base_of_its_moment(
    is_interleaved: bool,
) -> None:
    dims, base, factor, trained, count = 8, 500.0, 4.0, 6, 40
    x = mx.random.normal((1, 1, count, dims), key=mx.random.key(1))
    options = {"base": base, "factor": factor, "trained_length": trained}
    rope = DynamicRoPE(dims, is_interleaved=is_interleaved, **options)
    want = np.zeros((count, dims))
    for p, row in enumerate(np.asarray(x[0, 0], np.float64)):
        length = max(p + 1, trained)
        grown = base * (factor * length / trained - (factor - 1)) ** (dims / (dims - 2))
        angles = p / grown ** (np.arange(0, dims, 2) / dims)
        a, b = (row[0::2], row[1::2]) if is_interleaved else (row[: dims // 2], row[dims // 2 :])
        c, d = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
        want[p] = np.stack([c, d], 1).reshape(-1) if is_interleaved else np.concatenate([c, d])
    y = rope(x)
    assert relative_error(y[0, 0], mx.array(want)) <= FLOAT32
    chunks = [rope(x[:, :, :9]), rope(x[:, :, 9:10], 9), rope(x[:, :, 10:], mx.array([10]))]
    assert mx.array_equal(mx.concatenate(chunks, axis=2), y)
    plain = RoPE(dims, base=base, is_interleaved=is_interleaved)(x)
    assert relative_error(y[:, :, :trained], plain[:, :, :trained]) <= FLOAT32
    assert relative_error(y[:, :, trained:], plain[:, :, trained:]) > 0.1


def test_dynamic_scaling_has_an_offset_for_each_row() -> None:
    rope = DynamicRoPE(8, factor=2.0, trained_length=3)
    x = mx.random.normal((2, 3, 4, 8))
    y = rope(x, mx.array([0, 9]))
    assert mx.array_equal(y[:1], rope(x[:1]))
    assert mx.array_equal(y[1:], rope(x[1:], 9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 2}, "'dims' must be at least 4 but got 2"),
        ({"factor": 0.5}, "'factor' must be a number from 1 but got 0.5"),
        ({"trained_length": 0}, "'trained_length' must be positive but got 0"),
    ],
)
def test_impossible_dynamic_scaling(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=rf"\[DynamicRoPE\] .*{message}"):
        DynamicRoPE(**{"dims": 8, "factor": 2.0, "trained_length": 4, **options})


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    options = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "trained_length": 64}
    waves = mx.array([1.0, 16, 17, 63, 65, 1e4]) / (2 * math.pi)
    stretch = llama3_wavelengths(waves, factor=8.0, **options) / waves
    assert relative_error(stretch[:2], mx.ones(2)) <= FLOAT32
    assert relative_error(stretch[4:], 8 * mx.ones(2)) <= FLOAT32
    assert 1 < stretch[2].item() < stretch[3].item() < 8


def test_yarn_scaling_keeps_pairs_that_turn_often_and_stretches_the_others() -> None:
    plain = rope_wavelengths(128, 1e6)
    yarn = yarn_wavelengths(plain, base=1e6, factor=4.0, trained_length=32768)
    stretch = np.asarray(yarn / plain, np.float64)
    # within 32768 tokens, 32 turns lie at pair 23.6 and one turn at 39.7
    assert np.all(stretch[:24] == 1) and np.all(stretch[40:] == 4)
    unchanged = 1 - (np.arange(24, 40) - 23) / (40 - 23)
    np.testing.assert_allclose(stretch[24:40], 1 / (unchanged + (1 - unchanged) / 4), rtol=1e-6)
    exact = yarn_wavelengths(plain, base=1e6, factor=4.0, trained_length=32768, is_rounded=False)
    middle = np.asarray(exact / plain, np.float64)[24:40]
    low, high = (64 * math.log(32768 / (turns * 2 * math.pi)) / math.log(1e6) for turns in (32, 1))
    unchanged = np.clip(1 - (np.arange(24, 40) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(middle, 1 / (unchanged + (1 - unchanged) / 4), rtol=1e-5)


def test_yarn_attention_factor() -> None:
    assert yarn_attention_factor(4.0) == pytest.approx(1.138629436)
    assert yarn_attention_factor(40.0, 0.707) == pytest.approx(1.2608038)
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0


FAR_SCALINGS = {
    "default": lambda plain: plain,
    "linear": lambda plain: linear_wavelengths(plain, 4.0),
    "llama3": lambda plain: llama3_wavelengths(
        plain, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, trained_length=8192
    ),
    "yarn": lambda plain: yarn_wavelengths(plain, base=5e5, factor=4.0, trained_length=2048),
}


@pytest.mark.parametrize("kind", FAR_SCALINGS)
@pytest.mark.parametrize("position", [0, 1, 2047, 8191, 8192])
def test_far_positions(kind: str, position: int) -> None:
    wavelengths = FAR_SCALINGS[kind](rope_wavelengths(128, 5e5))
    x = mx.random.normal((1, 1, 1, 128), key=mx.random.key(3))
    # an angle is a float32 number in all implementations; what follows from it is exact here
    inverse = np.float32(1) / np.asarray(wavelengths)
    angle = (np.float32(position) * inverse).astype(np.float64)
    a, b = np.split(np.asarray(x, np.float64).reshape(-1), 2)
    want = np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)]
    )
    y = RoPE(128, wavelengths=wavelengths)(x, position)
    assert relative_error(y.reshape(-1), mx.array(want)) <= FLOAT32


@pytest.mark.parametrize("dims", [0, -2, 7])
def test_dims_come_in_pairs(dims: int) -> None:
    with pytest.raises(ValueError, match=r"\[RoPE\] 'dims' must be"):
        RoPE(dims)


@pytest.mark.parametrize("rope", [RoPE(8), DynamicRoPE(8, factor=2.0, trained_length=4)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_dtype_is_kept(rope: RoPE, dtype: mx.Dtype) -> None:
    assert rope(mx.ones((1, 1, 2, 8), dtype), mx.array([3])).dtype == dtype


def test_has_no_parameters() -> None:
    assert RoPE(8).parameters() == {}

"""Activation codes: formula, ties, edge values, and the straight-through gradient."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import rms_norm_quantize, straight_through


def test_formula_with_norm() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(6, 50)).astype(np.float32)
    weight = random.normal(size=50).astype(np.float32)
    y = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    y *= weight
    want = 127 / np.abs(y).max(-1, keepdims=True)
    codes, scale = rms_norm_quantize(mx.array(x), mx.array(weight), eps=1e-6)
    assert np.allclose(np.array(scale), want, rtol=1e-6)
    near_tie = np.abs(np.abs(y * want) % 1 - 0.5) < 1e-4
    assert np.array_equal(np.array(codes)[~near_tie], np.round(y * want)[~near_tie])


@pytest.mark.parametrize(
    ("rounding", "want"),
    [("half_even", [127, 0, 0, 2, -2, 2, 126]), ("half_away", [127, 1, -1, 2, -2, 3, 127])],
)
def test_exact_ties(rounding: str, want: list[int]) -> None:
    # The largest value is 127, so the scale is exactly 1 and the ties survive.
    x = mx.array([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 126.5]])
    codes, scale = rms_norm_quantize(x, rounding=rounding)
    assert scale.item() == 1.0
    assert codes.tolist() == [want]


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_just_below_a_tie(rounding: str) -> None:
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    codes, _ = rms_norm_quantize(mx.array([[127.0, below, -below]]), rounding=rounding)
    assert codes.tolist() == [[127, 0, 0]]


def test_zero_and_tiny_rows() -> None:
    codes, scale = rms_norm_quantize(mx.array([[0.0, 0.0], [1e-7, -1e-7]]))
    assert np.allclose(np.array(scale), 127 / 1e-5)
    assert codes.tolist() == [[0, 0], [1, -1]]


def test_a_bad_row_stays_alone() -> None:
    codes, _ = rms_norm_quantize(mx.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0], [4.0, -4.0]]))
    assert codes[0].tolist() == [64, 127]
    assert mx.isnan(codes[1]).any().item()
    assert mx.isnan(codes[2]).any().item()
    assert codes[3].tolist() == [127, -127]


def test_gradient_is_that_of_the_scaled_input() -> None:
    x = mx.random.normal((3, 8), key=mx.random.key(0))
    _, scale = rms_norm_quantize(x)
    gradient = mx.grad(lambda x: rms_norm_quantize(x)[0].sum())(x)
    assert mx.allclose(gradient, mx.broadcast_to(scale, x.shape))


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_straight_through_is_exact_under_every_transform(dtype: mx.Dtype) -> None:
    x = (mx.random.normal((4, 64), key=mx.random.key(1)) * 3).astype(dtype)

    def quantize(x: mx.array) -> mx.array:
        return straight_through(mx.round(x), x)

    def loss(x: mx.array) -> mx.array:
        return (quantize(x) ** 2).sum()

    want = 2 * mx.round(x)
    assert mx.array_equal(quantize(x), mx.round(x))
    assert mx.array_equal(mx.grad(loss)(x), want)
    assert mx.array_equal(mx.grad(lambda x: mx.vmap(loss)(x).sum())(x), want)
    assert mx.array_equal(mx.vmap(mx.grad(loss))(x), want)
    assert mx.array_equal(mx.compile(mx.grad(loss))(x), want)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'rounding' must be one of half_even, half_away"):
        rms_norm_quantize(mx.ones((1, 2)), rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'eps' must be given with 'weight'"):
        rms_norm_quantize(mx.ones((1, 2)), mx.ones(2))

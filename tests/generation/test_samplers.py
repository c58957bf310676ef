"""Samplers and filters against NumPy."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.generation import sampling
from mlx_mmfree.generation.sampling import Draw, chain, greedy, make_sampler, temperature

LOGITS = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 2
DRAWS = 20_000


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def allowed_by(keep: sampling.Filter, logits: np.ndarray = LOGITS) -> np.ndarray:
    filtered = np.array(keep(mx.array(logits)))
    is_finite = np.isfinite(filtered)
    np.testing.assert_array_equal(filtered[is_finite], logits[is_finite])
    return is_finite


def ranks(logits: np.ndarray) -> np.ndarray:
    """0 for the likeliest token of each row."""
    return np.argsort(np.argsort(-logits, axis=-1), axis=-1)


def top_p_set(logits: np.ndarray, mass: float) -> np.ndarray:
    result = np.zeros(logits.shape, bool)
    for row, probabilities in zip(result, softmax(logits), strict=True):
        total = 0.0
        for token in np.argsort(-probabilities):
            row[token] = True
            total += probabilities[token]
            if total >= mass:
                break
    return result


def test_greedy_takes_the_largest() -> None:
    np.testing.assert_array_equal(greedy(mx.array(LOGITS)), LOGITS.argmax(-1))


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.77, 0.95, 0.999])
def test_top_p(mass: float) -> None:
    np.testing.assert_array_equal(allowed_by(sampling.TopP(mass)), top_p_set(LOGITS, mass))


def test_top_p_stops_where_the_mass_is_reached_exactly() -> None:
    logits = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    assert allowed_by(sampling.TopP(0.5), logits).tolist() == [[False, True, False]]


@pytest.mark.parametrize("count", [1, 7, 49, 50, 51])
def test_top_k(count: int) -> None:
    np.testing.assert_array_equal(allowed_by(sampling.TopK(count)), ranks(LOGITS) < count)


def test_top_k_keeps_as_many_of_equal_logits() -> None:
    assert allowed_by(sampling.TopK(3), np.ones((2, 8), np.float32)).sum(-1).tolist() == [3, 3]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("least", [1, 5, 60])
def test_min_p(share: float, least: int) -> None:
    probabilities = softmax(LOGITS)
    expected = (probabilities >= share * probabilities.max(-1, keepdims=True) * (1 - 1e-6)) | (
        ranks(LOGITS) < least
    )
    np.testing.assert_array_equal(allowed_by(sampling.MinP(share, least)), expected)


def test_xtc_keeps_only_the_least_of_the_likely_tokens() -> None:
    probabilities = np.array([[0.4, 0.3, 0.2, 0.07, 0.03], [0.9, 0.04, 0.03, 0.02, 0.01]])
    logits = np.log(probabilities).astype(np.float32)
    expected = [[False, False, True, True, True], [True] * 5]
    assert allowed_by(sampling.XTC(1.0, 0.1), logits).tolist() == expected
    assert allowed_by(sampling.XTC(0.0, 0.1), logits).all()
    assert (
        allowed_by(sampling.XTC(1.0, 0.1, exempt=(1,)), logits).tolist()[0] == [False] + [True] * 4
    )


def test_xtc_of_mapped_rows() -> None:
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.07, 0.03], [0.2, 0.3, 0.4, 0.07, 0.03]]))
    keep = sampling.XTC(1.0, 0.1, exempt=(1,))
    assert mx.array_equal(mx.vmap(keep)(logits), keep(logits))


def test_xtc_filters_as_often_as_asked() -> None:
    mx.random.seed(2)
    logits = np.tile(np.log(np.array([[0.6, 0.4]], np.float32)), (DRAWS, 1))
    share = (~allowed_by(sampling.XTC(0.25, 0.1), logits)[:, 0]).mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / DRAWS)


@pytest.mark.parametrize("value", [0.5, 1.0, 1.7])
def test_temperature_draws_with_the_right_frequencies(value: float) -> None:
    mx.random.seed(1)
    logits = LOGITS[:1, :8]
    drawn = np.array(temperature(value)(mx.repeat(mx.array(logits), DRAWS, axis=0)))
    expected = softmax(logits / value)[0]
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    frequencies = np.bincount(drawn, minlength=8) / DRAWS
    assert np.all(np.abs(frequencies - expected) < 5 * deviation + 1e-4)


def test_tiny_temperature_is_greedy() -> None:
    drawn = temperature(1e-30)(mx.array(LOGITS))
    np.testing.assert_array_equal(drawn, LOGITS.argmax(-1))


def test_usual_order_is_top_p_min_p_top_k_temperature() -> None:
    mx.random.seed(3)
    options = {"top_p": 0.9, "min_p": 0.05, "top_k": 6}
    is_allowed = top_p_set(LOGITS, 0.9)
    probabilities = softmax(LOGITS)
    is_allowed &= probabilities >= 0.05 * probabilities.max(-1, keepdims=True)
    is_allowed &= ranks(LOGITS) < 6
    expected = softmax(np.where(is_allowed, LOGITS / 1.3, -np.inf))
    sampler = make_sampler(temp=1.3, **options)
    for row, probability in zip(LOGITS, expected, strict=True):
        drawn = np.array(sampler(mx.repeat(mx.array(row[None]), DRAWS, axis=0)))
        frequencies = np.bincount(drawn, minlength=50) / DRAWS
        deviation = np.sqrt(probability * (1 - probability) / DRAWS)
        assert np.all(np.abs(frequencies - probability) <= 5 * deviation)


def test_a_seed_repeats_the_choice() -> None:
    sampler = make_sampler(temp=1.0, top_p=0.95, xtc_probability=0.5)
    logits = mx.array(np.tile(LOGITS, (50, 1)))

    def drawn(seed: int) -> list[int]:
        mx.random.seed(seed)
        return sampler(logits).tolist()

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_zero_temperature_is_greedy_whatever_the_filters() -> None:
    assert make_sampler(temp=0.0, top_k=3, top_p=0.5) is greedy


def test_chain_applies_in_order() -> None:
    second_best = chain([lambda x: mx.where(x == mx.max(x), -mx.inf, x)], greedy)
    assert second_best(mx.array([[1.0, 5.0, 3.0]])).tolist() == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temp": -1.0}, "'temp' must be a finite number from 0 but got -1.0"),
        ({"temp": math.nan}, "'temp' must be a finite number from 0 but got nan"),
        ({"temp": math.inf}, "'temp' must be a finite number from 0 but got inf"),
        ({"top_p": 0.0}, "'top_p' must be above 0"),
        ({"top_p": 1.1}, "'top_p' must be above 0"),
        ({"top_p": math.nan}, "'top_p' must be above 0"),
        ({"top_k": -1}, "'top_k' must be at least 1"),
        ({"min_p": -0.1}, "'min_p' must be between"),
        ({"min_p": 2.0}, "'min_p' must be between"),
        ({"min_tokens_to_keep": 0}, "'min_tokens_to_keep' must be at least 1"),
        ({"xtc_probability": 1.5}, "'xtc_probability' must be between"),
        ({"xtc_threshold": 0.6}, "'xtc_threshold' must be between"),
    ],
)
def test_values_out_of_bounds_are_refused(options: dict[str, float], message: str) -> None:
    make: Callable[..., object] = make_sampler
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 3}])
def test_uniform_numbers_point_to_tokens_in_proportion(options: dict[str, Any]) -> None:
    logits, count = mx.array([[0.0, 2.0, 1.0, -3.0, 1.5]]), 2000
    sampler = make_sampler(temp=0.9, **options)
    assert isinstance(sampler, Draw)
    numbers = (mx.arange(count)[:, None] + 0.5) / count
    chances = mx.concatenate([numbers, numbers], axis=1)
    got = np.bincount(np.array(sampler.at(mx.repeat(logits, count, axis=0), chances)), minlength=5)
    want = np.array(mx.softmax(sampler.scores(logits)[0]))
    np.testing.assert_allclose(got / count, want, atol=1 / count)


def test_no_number_points_to_a_token_that_is_filtered() -> None:
    sampler = make_sampler(temp=1.0, top_k=1)
    assert isinstance(sampler, Draw)
    for token in range(3):
        logits = mx.where(mx.arange(3) == token, 5.0, 0.0)[None]
        for number in (0.0, 1 - 2.0**-24):
            assert sampler.at(logits, mx.full((1, 2), number)).item() == token

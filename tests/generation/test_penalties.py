"""Penalties against NumPy, followed over several steps."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.generation.sampling import (
    CountPenalty,
    LogitsProcessor,
    RepetitionPenalty,
    make_processors,
)

VOCAB_SIZE = 12
PROMPTS = [[1, 2, 3, 4, 5], [7, 7, 8]]
CHOSEN = [[3, 9], [9, 9], [3, 0], [11, 9]]


def logits_at(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(2, VOCAB_SIZE)).astype(np.float32)


def followed(processor: LogitsProcessor) -> list[np.ndarray]:
    """The changed logits before each of the chosen tokens, and after the last."""
    tokens = mx.array([[1, 2, 3, 4, 5], [0, 0, 7, 7, 8]])
    valid = mx.array([[True] * 5, [False] * 2 + [True] * 3])
    state = processor.start(tokens, valid, VOCAB_SIZE)
    results = []
    for step in range(len(CHOSEN) + 1):
        results.append(np.array(processor(mx.array(logits_at(step)), state)))
        if step < len(CHOSEN):
            state = processor.update(state, mx.array(CHOSEN[step]))
    return results


@pytest.mark.parametrize("context_size", [1, 2, 4, 20])
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition(penalty: float, context_size: int) -> None:
    for step, result in enumerate(followed(RepetitionPenalty(penalty, context_size))):
        expected = logits_at(step)
        for row, prompt in enumerate(PROMPTS):
            text = prompt + [chosen[row] for chosen in CHOSEN[:step]]
            for token in set(text[-context_size:]):
                value = expected[row, token]
                expected[row, token] = value / penalty if value > 0 else value * penalty
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.4), (-0.5, 0.2)])
def test_presence_and_frequency_count_what_was_written(presence: float, frequency: float) -> None:
    for step, result in enumerate(followed(CountPenalty(presence, frequency))):
        expected = logits_at(step)
        for row in range(2):
            text = [chosen[row] for chosen in CHOSEN[:step]]
            for token in set(text):
                expected[row, token] -= presence + frequency * text.count(token)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_only_what_is_asked_for_is_made() -> None:
    assert make_processors() == []
    kinds = [type(p) for p in make_processors(repetition_penalty=1.2, frequency_penalty=0.1)]
    assert kinds == [RepetitionPenalty, CountPenalty]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "'repetition_penalty' must be positive"),
        ({"repetition_penalty": math.nan}, "'repetition_penalty' must be positive and finite"),
        ({"repetition_penalty": math.inf}, "'repetition_penalty' must be positive and finite"),
        ({"repetition_context_size": 0}, "'repetition_context_size' must be at least 1"),
        ({"presence_penalty": math.inf}, "'presence_penalty' must be finite"),
        ({"frequency_penalty": math.nan}, "'frequency_penalty' must be finite"),
    ],
)
def test_values_out_of_bounds_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_processors(**options)

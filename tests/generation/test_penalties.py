"""Penalties against NumPy, followed over several steps."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import demo, load
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.generation.sampling import (
    CountPenalty,
    LogitBias,
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


def test_biases_are_added_before_penalties() -> None:
    """The order of `make_logits_processors` in mlx-lm 0.32.2."""
    bias, penalty = make_processors(2.0, logit_bias={1: -3.0, 0: 2.0})
    state = penalty.start(mx.array([[1, 0]]), None, 4)
    changed = penalty(bias(mx.ones((2, 4)), bias.start(mx.array([[1, 0]]), None, 4)), state)
    assert changed.tolist() == [[1.5, -4.0, 1.0, 1.0]] * 2


def test_texts_with_equal_biases_are_one_batch() -> None:
    first, same = LogitBias.of({1: 2.0, 3: -1.0}), LogitBias.of({3: -1.0, 1: 2.0})
    assert first == same != LogitBias.of({1: 2.0})


def test_a_forbidden_token_is_not_written() -> None:
    model, tokenizer = load(demo.path())
    prompt = tokenizer.encode("Once upon a")
    [first] = generate_tokens(model, prompt, max_tokens=1)
    forbidden = make_processors(logit_bias={first: -math.inf})
    assert first not in generate_tokens(model, prompt, max_tokens=8, processors=forbidden)


@pytest.mark.parametrize("token", [-1, 3.5, "1"])
def test_token_ids_that_are_none_are_refused(token: Any) -> None:
    with pytest.raises(ValueError, match="'logit_bias' must have token ids from 0 but got"):
        make_processors(logit_bias={token: 1.0})
    with pytest.raises(ValueError, match="'logit_bias' must have token ids below 5 but got 5"):
        make_processors(logit_bias={5: 1.0})[0].start(mx.array([[0]]), None, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {1: math.nan}}, "'logit_bias' must have finite numbers or minus infinity"),
        ({"logit_bias": {1: math.inf}}, "'logit_bias' must have finite numbers or minus infinity"),
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

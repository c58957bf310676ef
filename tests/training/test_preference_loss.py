"""DPO and ORPO: their losses and gradients in float64, and what they read of a batch."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.training.fine_tuning.preferences import (
    LossType,
    Pair,
    TrainMode,
    answer_log_probabilities,
    dpo,
    orpo,
    pair_batch,
    preference_loss,
    preferences,
)
from mlx_mmfree.training.samples import Sample
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error
from tests.training.test_loop import _model

Numbers = np.ndarray
BETA = 0.3


def _sigmoid(x: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-x))


def _odds(mean: Numbers) -> Numbers:
    return np.exp(mean) / (1 - np.exp(mean))


DEFINITIONS: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "sigmoid": lambda c, r: -np.log(_sigmoid(BETA * (c - r))),
    "hinge": lambda c, r: np.maximum(1 - BETA * (c - r), 0),
    "ipo": lambda c, r: (c - r - 1 / (2 * BETA)) ** 2,
    "orpo": lambda c, r: -c - BETA * np.log(_sigmoid(np.log(_odds(c) / _odds(r)))),
}


def _losses(name: str, chosen: mx.array, rejected: mx.array) -> mx.array:
    if name == "orpo":
        return orpo(chosen, rejected, beta=BETA).losses
    types: dict[str, LossType] = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo"}
    return dpo(chosen, rejected, beta=BETA, loss_type=types[name]).losses


@pytest.mark.parametrize("name", DEFINITIONS)
def test_losses_and_gradients(name: str) -> None:
    random = np.random.default_rng(1)
    # mean log-probabilities are negative
    chosen, rejected = (-random.uniform(0.05, 6, 20) for _ in range(2))
    definition = DEFINITIONS[name]
    given = mx.array(chosen.astype(np.float32)), mx.array(rejected.astype(np.float32))
    wanted = definition(chosen, rejected)
    assert relative_error(_losses(name, *given), mx.array(wanted)) <= TOLERANCE[mx.float32]
    got = mx.grad(lambda *both: _losses(name, *both).sum(), argnums=(0, 1))(*given)
    step = 1e-6
    slopes = (
        (definition(chosen + step, rejected) - definition(chosen - step, rejected)) / (2 * step),
        (definition(chosen, rejected + step) - definition(chosen, rejected - step)) / (2 * step),
    )
    for gradient, slope in zip(got, slopes, strict=True):
        assert relative_error(gradient, mx.array(slope)) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("name", DEFINITIONS)
def test_far_ratios_are_finite(name: str) -> None:
    far = mx.array([-500.0, -1e-9, 0.0, -500.0, -1e-9]), mx.array([0.0, -500.0, 0.0, -500.0, -1e-9])
    assert mx.isfinite(_losses(name, *far)).all().item()
    for gradient in mx.grad(lambda *both: _losses(name, *both).sum(), argnums=(0, 1))(*far):
        assert mx.isfinite(gradient).all().item()


def _pairs(reference: bool = True) -> list[Pair]:
    random = np.random.default_rng(2)

    def sample(length: int, prompt: int) -> Sample:
        return Sample(random.integers(0, 40, length).astype(np.int32), prompt)

    return [
        Pair(
            sample(4 + n, 2),
            sample(9 - n, 3),
            (-10.0 - n, -12.0 + 3 * n) if reference else None,
        )
        for n in range(3)
    ]


def _log_probability(model: Decoder, sample: Sample) -> tuple[float, int]:
    """The log-probability of an answer and its tokens, from the text's logits alone, in float64."""
    logits = np.array(model(mx.array(sample.tokens[None, :-1]))[0][0]).astype(np.float64)
    each = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    positions = range(sample.prompt - 1, len(sample.tokens) - 1)
    return sum(each[n, sample.tokens[n + 1]] for n in positions), len(positions)


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [("dpo", "sigmoid"), ("dpo", "hinge"), ("dpo", "ipo"), ("orpo", "sigmoid")],
)
def test_a_batch_is_what_each_pair_gives_alone(mode: TrainMode, loss_type: LossType) -> None:
    model, pairs = _model(), _pairs()
    wanted, margins = [], []
    for pair in pairs:
        (c, c_count), (r, r_count) = (_log_probability(model, text) for text in pair.texts)
        assert pair.reference is not None
        if mode == "orpo":
            c, r = c / c_count, r / r_count
        else:
            c, r = c - pair.reference[0], r - pair.reference[1]
        if loss_type == "ipo":
            c, r = c / c_count, r / r_count
        name = "orpo" if mode == "orpo" else loss_type
        wanted.append(DEFINITIONS[name](np.array(c), np.array(r)))
        margins.append(BETA * (c - r))
    batch = pair_batch(pairs)
    assert batch.terms == 3
    got = preferences(model, batch, mode, beta=BETA, loss_type=loss_type)
    assert relative_error(got.losses, mx.array(np.array(wanted))) <= TOLERANCE[mx.float32]
    assert relative_error(got.margins, mx.array(np.array(margins))) <= TOLERANCE[mx.float32]
    total = preference_loss(mode, beta=BETA, loss_type=loss_type)(model, batch)
    assert relative_error(total, got.losses.sum()) <= TOLERANCE[mx.float32]


def test_log_probabilities_are_those_of_the_answers() -> None:
    model, pairs = _model(), _pairs()
    batch = pair_batch(pairs)
    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    wanted = [_log_probability(model, row)[0] for row in rows]
    got = answer_log_probabilities(model, batch)
    assert relative_error(got, mx.array(wanted)) <= TOLERANCE[mx.float32]


@pytest.mark.exhaustive
def test_a_published_vocabulary_in_blocks() -> None:
    mx.random.seed(3)
    llama = find("llama")
    config = llama.config.from_hub({**llama.tiny, "vocab_size": 128_256})
    model = llama.build(config)
    random = np.random.default_rng(4)
    rows = [
        Sample(random.integers(0, 128_256, length).astype(np.int32), 3) for length in (150, 120)
    ]
    batch = pair_batch([Pair(*rows)])
    assert batch.targets.size * 128_256 > 2**25
    got = answer_log_probabilities(model, batch)
    wanted = [_log_probability(model, row)[0] for row in rows]
    assert relative_error(got, mx.array(wanted)) <= TOLERANCE[mx.float32]


def test_dpo_needs_a_reference() -> None:
    with pytest.raises(TrainingError, match="under a reference model but has none"):
        preferences(_model(), pair_batch(_pairs(reference=False)), "dpo")

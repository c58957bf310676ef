"""GRPO: its loss, advantages and gradients in float64, and what they read of a batch."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree.models import Decoder
from mlx_mmfree.training.batches import padded_batch
from mlx_mmfree.training.losses.grpo_loss import (
    GroupBatch,
    GRPOLoss,
    group_advantages,
    group_batch,
    grpo,
    grpo_loss,
    with_log_probabilities,
)
from mlx_mmfree.training.samples import Sample
from tests.hub.checkpoints import tiny_of
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

Numbers = np.ndarray
BETA, LOW, HIGH, TEMPERATURE, LONGEST = 0.3, 0.2, 0.35, 0.7, 9


def _definition(now: Numbers, old: Numbers, reference: Numbers | None, good: Numbers) -> Numbers:
    """The loss of each token, case by case."""
    losses = np.empty_like(now)
    for index in np.ndindex(now.shape):
        ratio, advantage = np.exp(now[index] - old[index]), good[index[0], 0]
        counted = min(ratio, 1 + HIGH) if advantage > 0 else max(ratio, 1 - LOW)
        losses[index] = -advantage * counted
        if reference is not None:
            other = reference[index] - now[index]
            losses[index] += BETA * (np.exp(other) - 1 - other)
    return losses


@pytest.mark.parametrize("has_reference", [False, True])
def test_losses_and_gradients(has_reference: bool) -> None:
    draw = np.random.default_rng(1)
    now = -draw.uniform(0.05, 6, (6, 20))
    old = now + draw.uniform(-0.6, 0.6, now.shape)
    ratios = np.exp(now - old)
    assert (ratios > 1 + HIGH).any() and (ratios < 1 - LOW).any()
    # a difference across a corner is no gradient
    assert min(np.abs(ratios - 1 - HIGH).min(), np.abs(ratios - 1 + LOW).min()) > 1e-5
    reference = now + draw.normal(size=now.shape) if has_reference else None
    good = draw.normal(size=(6, 1))

    def loss(now: mx.array) -> mx.array:
        arrays = (old, good) if reference is None else (old, good, reference)
        given = [mx.array(array.astype(np.float32)) for array in arrays]
        others = (given[0], given[2] if len(given) > 2 else None, given[1])
        return grpo(now, *others, beta=BETA, epsilon=LOW, epsilon_high=HIGH)

    given = mx.array(now.astype(np.float32))
    wanted = _definition(now, old, reference, good)
    assert relative_error(loss(given), mx.array(wanted)) <= TOLERANCE[mx.float32]
    got = mx.grad(lambda now: loss(now).sum())(given)
    step = 1e-6
    slope = (
        _definition(now + step, old, reference, good)
        - _definition(now - step, old, reference, good)
    ) / (2 * step)
    assert relative_error(got, mx.array(slope)) <= GRADIENT_TOLERANCE


def test_advantages_compare_within_a_group() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    found = group_advantages(rewards)
    deviation = np.sqrt(((rewards[0] - 1) ** 2).sum() / 3)
    assert np.allclose(found[0], (rewards[0] - 1) / (deviation + 1e-4), rtol=1e-12)
    # a group of equals teaches nothing
    assert (found[1] == 0).all()
    assert (group_advantages(rewards, scaled=False)[0] == rewards[0] - 1).all()


def _answers() -> list[Sample]:
    draw = np.random.default_rng(2)
    return [Sample(draw.integers(0, 60, 3 + length).astype(np.int32), 3) for length in (4, 9, 1, 6)]


GOOD = np.array([0.7, -1.2, 0.9, -0.4])


def _logits(model: Decoder, answer: Sample) -> tuple[Numbers, Numbers]:
    """Of each token of an answer, the hidden values and the logits, float64."""
    tokens = mx.array(answer.tokens[None, :-1])
    hidden = np.array(model.hidden(tokens)[0][0, answer.prompt - 1 :]).astype(np.float64)
    return hidden, hidden @ np.array(model.head.weight).astype(np.float64).T / TEMPERATURE


def _log_softmax(logits: Numbers) -> Numbers:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _shares(loss_type: GRPOLoss, answers: list[Sample]) -> list[float]:
    lengths = [answer.length - answer.prompt for answer in answers]
    if loss_type == "grpo":
        return [1 / length for length in lengths]
    if loss_type == "bnpo":
        return [len(answers) / sum(lengths)] * len(answers)
    return [1 / LONGEST] * len(answers)


def _batch(loss_type: GRPOLoss, old: Decoder | None, reference: Decoder | None) -> GroupBatch:
    batch = group_batch(_answers(), GOOD, loss_type, LONGEST)
    return with_log_probabilities(batch, old, reference, TEMPERATURE)


@pytest.mark.parametrize("is_old", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_a_batch_is_what_each_answer_gives_alone(loss_type: GRPOLoss, is_old: bool) -> None:
    """The loss, and its gradient with respect to the head, which float64 computes by hand."""
    model, writer, reference = (tiny_of("llama", seed=seed) for seed in (1, 2, 3))
    batch = _batch(loss_type, writer if is_old else None, reference)
    assert batch.terms == 4 and (batch.old is not None) == is_old
    total, slope = 0.0, np.zeros(model.head.weight.shape)
    for answer, good, share in zip(_answers(), GOOD, _shares(loss_type, _answers()), strict=True):
        hidden, logits = _logits(model, answer)
        targets = answer.tokens[answer.prompt :]
        rows = np.arange(len(targets))
        now = _log_softmax(logits)[rows, targets]
        old, of_reference = (
            _log_softmax(_logits(other, answer)[1])[rows, targets] for other in (writer, reference)
        )
        old = old if is_old else now
        losses = _definition(now[None], old[None], of_reference[None], np.array([[good]]))
        total += share * losses.sum()
        ratio = np.exp(now - old)
        clipped = (ratio > 1 + HIGH) if good > 0 else (ratio < 1 - LOW)
        outer = np.where(clipped, 0, -good * ratio) + BETA * (1 - np.exp(of_reference - now))
        of_logits = -np.exp(_log_softmax(logits))
        of_logits[rows, targets] += 1
        slope += share * ((outer[:, None] * of_logits).T @ hidden) / TEMPERATURE
    loss = grpo_loss(beta=BETA, epsilon=LOW, epsilon_high=HIGH, temperature=TEMPERATURE)
    value, gradient = nn.value_and_grad(model, loss)(model, batch)
    assert abs(value.item() - total) <= TOLERANCE[mx.float32] * max(abs(total), 1)
    assert relative_error(gradient["head"]["weight"], mx.array(slope)) <= GRADIENT_TOLERANCE


def test_an_answer_of_the_model_itself_begins_at_no_loss_but_the_divergence() -> None:
    model = tiny_of("llama", seed=1)
    loss = grpo_loss(beta=BETA, epsilon=LOW, epsilon_high=HIGH, temperature=TEMPERATURE)
    batch = _batch("dr_grpo", None, model)
    counts = padded_batch(_answers()).weights.sum(axis=1)
    wanted = -(GOOD * counts / LONGEST).sum()
    assert abs(loss(model, batch).item() - wanted) <= 1e-5

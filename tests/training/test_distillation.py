"""Distillation: the divergence and its gradient in float64, what is frozen, what is refused."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.optimizers import Adam
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.batches import Batch, padded_batch
from mlx_mmfree.training.losses import loss as module
from mlx_mmfree.training.losses.distillation_loss import distillation_loss, divergence
from mlx_mmfree.training.losses.loss import batch_logits, next_token_loss
from mlx_mmfree.training.samples import Sample
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error
from tests.training.test_loop import _model

FORMATS = [(1.0, None), (2.5, None), (1.0, 5), (2.5, 5), (1.0, 40)]


def wanted_divergence(
    logits: np.ndarray, wanted: np.ndarray, temperature: float, top_k: int | None
) -> np.ndarray:
    """The definition, computed term by term in float64."""
    q = np.exp(logits / temperature)
    q /= q.sum(-1, keepdims=True)
    p = np.exp(wanted / temperature)
    if top_k is not None:
        smallest = np.sort(wanted, axis=-1)[..., -top_k, None]
        p = np.where(wanted >= smallest, p, 0.0)
    p /= p.sum(-1, keepdims=True)
    terms = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(q)), 0.0)
    return temperature**2 * terms.sum(-1)


def logits_of(seed: int, *shape: int) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(("temperature", "top_k"), FORMATS)
def test_divergence_and_its_gradient(temperature: float, top_k: int | None) -> None:
    logits, wanted = logits_of(0, 2, 3, 40), logits_of(1, 2, 3, 40)

    def measure(logits: mx.array, wanted: mx.array) -> mx.array:
        return divergence(logits, wanted, temperature=temperature, top_k=top_k)

    ours = mx.array(logits.astype(np.float32)), mx.array(wanted.astype(np.float32))
    want = wanted_divergence(logits, wanted, temperature, top_k)
    assert (want > 0).all()
    assert relative_error(measure(*ours), mx.array(want)) <= TOLERANCE[mx.float32]
    got, none = mx.grad(lambda *given: measure(*given).sum(), argnums=(0, 1))(*ours)
    # row n of `change` moves logit n of every distribution
    change = 1e-5 * np.eye(40)[:, None, None, :]
    high, low = (
        wanted_divergence(logits + sign * change, wanted, temperature, top_k) for sign in (1, -1)
    )
    slopes = mx.array(np.moveaxis((high - low) / 2e-5, 0, -1))
    assert relative_error(got, slopes) <= GRADIENT_TOLERANCE
    assert not none.any().item()


def test_equal_models_do_not_diverge() -> None:
    logits = mx.array(logits_of(0, 4, 40).astype(np.float32))
    assert mx.abs(divergence(logits, logits + 7.0, temperature=2.0)).max().item() <= 1e-5


def batch() -> Batch:
    random = np.random.default_rng(3)
    samples = [Sample(random.integers(0, 40, n).astype(np.int32), prompt=3) for n in (9, 14)]
    return padded_batch(samples)


@pytest.mark.parametrize(("temperature", "top_k"), FORMATS)
def test_loss_and_its_gradient_through_the_model(temperature: float, top_k: int | None) -> None:
    student, teacher = _model(), _model(linear_class="dense", intermediate_size=48)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "weight": 0.7}
    loss = distillation_loss(teacher, student, **options)
    value, gradient = nn.value_and_grad(student, loss)(student, batch())
    weights = batch().weights.astype(np.float64)
    logits, wanted = (
        np.array(batch_logits(model, batch()), np.float64) for model in (student, teacher)
    )
    want = (weights * wanted_divergence(logits, wanted, temperature, top_k)).sum()
    alone, of_data = nn.value_and_grad(student, next_token_loss)(student, batch())
    assert value.item() == pytest.approx(alone.item() + 0.7 * want, rel=1e-5)

    # the gradient at the logits in closed form, pulled back through the model
    def softmax(values: np.ndarray) -> np.ndarray:
        powers = np.exp(values / temperature)
        return powers / powers.sum(-1, keepdims=True)

    if top_k is not None:
        smallest = np.sort(wanted, axis=-1)[..., -top_k, None]
        wanted = np.where(wanted >= smallest, wanted, -np.inf)
    upstream = 0.7 * temperature * (softmax(logits) - softmax(wanted)) * weights[..., None]
    pulled = mx.array(upstream.astype(np.float32))
    of_teacher = nn.value_and_grad(
        student, lambda model: (batch_logits(model, batch()) * pulled).sum()
    )(student)[1]
    parts = dict(tree_flatten(of_data)), dict(tree_flatten(of_teacher))
    for name, got in tree_flatten(gradient):
        assert relative_error(got, parts[0][name] + parts[1][name]) <= GRADIENT_TOLERANCE, name
    assert not tree_flatten(teacher.trainable_parameters())


def test_logits_of_both_models_are_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"vocab_size": 4001, "hidden_size": 16, "num_hidden_layers": 1}
    student, teacher = _model(**options), _model(**options, linear_class="dense")
    given = Batch.of_rows(np.random.default_rng(3).integers(0, 4001, (2, 513), dtype=np.int32))
    loss = distillation_loss(teacher, student, weight=0.7, temperature=2.0, top_k=50)
    mx.eval(student.parameters(), teacher.parameters())
    values, gradients, peaks = [], [], []
    for whole in (2**25, 0):
        monkeypatch.setattr(module, "_WHOLE", whole)
        monkeypatch.setattr(module, "_BLOCK", 2**16)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        value, gradient = nn.value_and_grad(student, loss)(student, given)
        mx.eval(value, gradient)
        peaks.append(mx.get_peak_memory() - before)
        values.append(value)
        gradients.append(dict(tree_flatten(gradient)))
    assert relative_error(values[1], values[0]) <= 1e-6
    for name, want in gradients[0].items():
        assert relative_error(gradients[1][name], want) <= GRADIENT_TOLERANCE, name
    # the logits of one model take 16 MB
    assert peaks[0] > 2 * 16e6 > 2 * peaks[1]


def test_a_student_comes_closer_to_its_teacher() -> None:
    student, teacher = _model(), _model(linear_class="dense", intermediate_size=48)
    teacher.head.weight = 20 * teacher.head.weight
    loss = distillation_loss(teacher, student, weight=100.0, temperature=1.0)
    optimizer, step = Adam(1e-2), nn.value_and_grad(student, loss)
    losses = []
    for _ in range(20):
        value, gradient = step(student, batch())
        optimizer.update(student, gradient)
        losses.append(value.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": 0.0}, "'weight' must be positive and finite but got 0.0"),
        ({"weight": float("inf")}, "'weight' must be positive and finite but got inf"),
        ({"temperature": -1.0}, "'temperature' must be positive and finite but got -1.0"),
        ({"temperature": float("nan")}, "'temperature' must be positive and finite but got nan"),
        ({"top_k": 1}, "'top_k' must be from 2 to the size of the vocabulary, 40, but got 1"),
        ({"top_k": 41}, "'top_k' must be from 2"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(TrainingError, match=reason):
        distillation_loss(_model(), _model(), **{"weight": 1.0, "temperature": 1.0, **options})


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(TrainingError, match="40 tokens but has 41"):
        distillation_loss(_model(vocab_size=41), _model(), weight=1.0, temperature=1.0)

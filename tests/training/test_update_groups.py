"""The update in groups of weights: the bits of one whole update, in less memory."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.training import optimizer_step
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import OPTIMIZERS, build_optimizer, named_optimizer
from mlx_mmfree.training.optimizer_step import BatchGradient, update_groups
from mlx_mmfree.training.precision import frozen_in_dtype, in_dtype
from mlx_mmfree.training.settings import Settings
from tests.training.test_compiled_step import STEPS, batch, model, run

RUN = Settings(
    output="run", stages=(Stage(1, {}),), model={"model_type": "llama"}, optimizer="adamw8bit"
)


def optimizer_of(name: str) -> Any:
    return build_optimizer(RUN) if name == "several" else named_optimizer(name, 1e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [*OPTIMIZERS, "several"])
def test_groups_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (1, 2**60):
        monkeypatch.setattr(optimizer_step, "_GROUP", size)
        optimizer = optimizer_of(name)
        results, weights = run(model("llama"), optimizer=optimizer)
        found.append((results, weights | dict(tree_flatten(optimizer.state))))
    (results, arrays), (wanted_results, wanted) = found
    assert results == wanted_results and arrays.keys() == wanted.keys()
    for key, array in arrays.items():
        assert mx.array_equal(array, wanted[key]), key


def test_a_run_is_that_of_mlx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_step, "_GROUP", 1)
    _, weights = run(model("llama"), optimizer=named_optimizer("sgd", 1e-2))
    trained, optimizer = model("llama"), named_optimizer("sgd", 1e-2)
    loss_and_gradient = nn.value_and_grad(trained, next_token_loss)
    for step in range(STEPS):
        given = batch(step)
        _, gradient = loss_and_gradient(trained, given)
        mean = tree_map(lambda g, n=given.tokens: g / n, gradient)
        norm = mx.sqrt(sum(mx.square(g).sum() for _, g in tree_flatten(mean)))
        scale = mx.minimum(1.0, 1 / (norm + 1e-6))
        optimizer.learning_rate = mx.array(1e-2 / (step + 1))
        optimizer.update(trained, tree_map(lambda g, factor=scale: g * factor, mean))
    for key, array in tree_flatten(trained.parameters()):
        assert mx.allclose(weights[key], array, rtol=1e-5, atol=1e-7), key


@pytest.mark.parametrize("name", ["adamw8bit", "several", "muon"])
def test_a_weight_is_in_one_group_with_its_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, optimizer = model("llama"), optimizer_of(name)
    parameters = trained.trainable_parameters()
    optimizer.init(parameters)
    weights: dict[str, mx.array] = dict(tree_flatten(parameters))
    state: dict[str, mx.array] = dict(tree_flatten(optimizer.state))
    monkeypatch.setattr(optimizer_step, "_GROUP", 1)
    groups = [{id(array) for array in group} for group in update_groups(parameters, state)]
    assert len(groups) == len(weights)
    assert sum(map(len, groups)) == len(weights) + len(state)
    for key, weight in weights.items():
        own = next(group for group in groups if id(weight) in group)
        of_weight = {path for path in state if f".{key}." in f".{path}."}
        assert of_weight and {id(state[path]) for path in of_weight} <= own
    sizes = sorted(weight.nbytes for weight in weights.values())
    monkeypatch.setattr(optimizer_step, "_GROUP", sum(sizes) // 3)
    some = [sum(a.nbytes for a in group) for group in update_groups(parameters, {})]
    assert 3 <= len(some) < len(weights) and max(some) <= max(sum(sizes) // 3, sizes[-1])


def test_gradients_in_16_bits_lose_nothing() -> None:
    trained = model("llama")
    _, halves = BatchGradient(trained, next_token_loss, False, mx.bfloat16)(batch(0))
    loss = in_dtype(next_token_loss, trained, mx.bfloat16)
    _, wanted = nn.value_and_grad(trained, loss)(trained, batch(0))
    for (key, array), (_, whole) in zip(tree_flatten(halves), tree_flatten(wanted), strict=True):
        assert array.dtype == mx.bfloat16 and whole.dtype == mx.float32
        assert mx.array_equal(array.astype(mx.float32), whole), key


def test_frozen_weights_in_16_bits_change_no_step() -> None:
    found = []
    for is_narrow in (False, True):
        trained = model("llama")
        trained.update(
            tree_map(lambda a: a.astype(mx.bfloat16).astype(mx.float32), trained.parameters())
        )
        before = dict(tree_flatten(trained.parameters()))
        trained.blocks[0].freeze()
        frozen = before.keys() - dict(tree_flatten(trained.trainable_parameters())).keys()
        if is_narrow:
            with frozen_in_dtype(trained, mx.bfloat16):
                given = dict(tree_flatten(trained.parameters()))
                assert {k for k, a in given.items() if a.dtype == mx.bfloat16} == frozen
                run(trained, dtype=mx.bfloat16)
        else:
            run(trained, dtype=mx.bfloat16)
        after = dict(tree_flatten(trained.parameters()))
        assert all(mx.array_equal(after[key], before[key]) for key in frozen)
        found.append(after)
    for key, array in found[0].items():
        assert found[1][key].dtype == mx.float32
        assert mx.array_equal(array, found[1][key]), key


def test_a_group_needs_less_than_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for size in (2**60, 2**18):
        monkeypatch.setattr(optimizer_step, "_GROUP", size)
        parameters = {f"w{n}": mx.ones((256, 512)) for n in range(16)}
        optimizer = named_optimizer("adamw8bit", 1e-2)
        optimizer.init(parameters)
        mx.eval(parameters, optimizer.state)
        gradient = tree_map(mx.ones_like, parameters)
        mx.eval(gradient)
        new = optimizer.apply_gradients(gradient, parameters)
        del gradient, parameters
        size = sum(array.nbytes for _, array in tree_flatten([new, optimizer.state]))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for group in update_groups(new, optimizer.state):
            mx.eval(group)
        peaks.append(mx.get_peak_memory() - before)
        del new, optimizer, group
    # how much more than all that is new the whole takes depends on when MLX frees what it no longer
    # needs; one weight takes 14 times its 0.5 MB for a moment
    assert peaks[1] < 0.65 * size and size <= peaks[0]

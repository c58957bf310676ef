"""A compiled training step has the bits of a graph that is built anew, and is built once a format."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.models import Decoder, find, set_dropout
from mlx_mmfree.ops.backend import choice, dispatch
from mlx_mmfree.ops.backend.compilation import can_compile
from mlx_mmfree.training import optimizer_step
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.fine_tuning.preferences import PairBatch, preference_loss
from mlx_mmfree.training.losses import loss as loss_module
from mlx_mmfree.training.losses.distillation_loss import distillation_loss
from mlx_mmfree.training.losses.loss import Loss, next_token_loss
from mlx_mmfree.training.optimizer import OPTIMIZERS, named_optimizer
from mlx_mmfree.training.optimizer_step import Batches, OptimizerStep, StepResult, checkpoint_blocks
from mlx_mmfree.training.run_settings import LoopSettings

STEPS = 5
# MLX traces the first function of a process twice
MOST_GRAPHS = 2

pytestmark = pytest.mark.skipif(not can_compile(), reason="MLX cannot compile here")


def model(name: str = "hgrn_bit") -> Decoder:
    mx.random.seed(4)
    architecture = find(name)
    built: Decoder = architecture.build(architecture.config.from_hub(architecture.tiny))
    built.train()
    return built


def adapted(is_recomputed: bool = False) -> Decoder:
    """A packed model with adapters, whose dropout draws numbers."""
    built = pack_linears(model())
    add_adapters(built, lambda *_: True, dropout=0.2)
    if is_recomputed:
        checkpoint_blocks(built)
    return built


def dropping(is_recomputed: bool = False) -> Decoder:
    """A model whose blocks drop numbers that are drawn."""
    built = model()
    set_dropout(built, 0.2)
    if is_recomputed:
        checkpoint_blocks(built)
    return built


def batch(seed: int, rows: int = 3, length: int = 12) -> Batch:
    tokens = np.random.default_rng(seed).integers(0, 16, (rows, length + 1)).astype(np.int32)
    return Batch.of_rows(tokens)


def padded(step: int) -> list[Batch]:
    """A batch of one of two lengths, of which one has padding, and of which one has starts."""
    whole = batch(step, length=(8, 12)[step % 2])
    mask = np.ones(whole.inputs.shape, bool)
    mask[0, 5:] = False
    name = ("valid", "starts")[step % 2]
    return [Batch(whole.inputs, whole.targets, whole.weights * mask, **{name: mask})]


def pairs(step: int) -> list[Batch]:
    whole = batch(step, rows=4)
    reference = np.random.default_rng(step).normal(size=(2, 2)).astype(np.float32) - 20
    return [PairBatch(whole.inputs, whole.targets, whole.weights, reference=reference)]


def run(
    trained: Decoder,
    batches: Batches = lambda step: [batch(step)],
    *,
    loss: Loss = next_token_loss,
    optimizer: optim.Optimizer | None = None,
    **settings: Any,
) -> tuple[list[StepResult], dict[str, mx.array]]:
    step = OptimizerStep(
        trained,
        LoopSettings(Path("unused"), STEPS, clip_norm=1.0, **settings),
        named_optimizer("adamw", 1e-2) if optimizer is None else optimizer,
        lambda step: mx.array(1e-2 / (step + 1)),
        batches,
        loss,
        DataParallel(),
    )
    results = [step(number) for number in range(STEPS)]
    return results, dict(tree_flatten(trained.parameters()))


def assert_same_bits(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results, weights = call()
    monkeypatch.setattr(optimizer_step, "can_compile", lambda: False)
    wanted_results, wanted = call()
    assert results == wanted_results
    for name, array in weights.items():
        assert mx.array_equal(array, wanted[name]), name


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a head of more than the numbers from which moments are kept in 8 bits
    def call() -> Any:
        return run(model(), optimizer=named_optimizer(name, 1e-2))

    assert_same_bits(call, monkeypatch)


CALLS: dict[str, Callable[[], Any]] = {
    "accumulation": lambda: run(model(), lambda step: [batch(step), batch(step + 9)]),
    "adapters with dropout": lambda: run(adapted()),
    "adapters in recomputed blocks": lambda: run(adapted(True)),
    "attention": lambda: run(model("llama")),
    "bfloat16": lambda: run(model("llama"), dtype=mx.bfloat16),
    "distillation": lambda: run(
        trained := model(),
        loss=distillation_loss(model("llama"), trained, weight=1.0, temperature=1.0, top_k=4),
    ),
    "dropout": lambda: run(dropping()),
    "dropout in recomputed blocks": lambda: run(dropping(True)),
    "formats of batches": lambda: run(model(), padded),
    "preferences": lambda: run(model(), pairs, loss=preference_loss("dpo")),
    "warm-up": lambda: run(model(), quantization_warmup=3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_bits(CALLS[name], monkeypatch)


def test_recomputed_blocks_drop_the_same_numbers() -> None:
    results, weights = run(dropping())
    assert results != run(model())[0]
    again, recomputed = run(dropping(True))
    for one, other in zip(results, again, strict=True):
        assert abs(one.loss - other.loss) <= 1e-5 * one.loss
    for name, array in weights.items():
        assert mx.allclose(array, recomputed[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("name", ["adapters in recomputed blocks", "warm-up"])
def test_the_same_bits_without_the_extension(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "native_unavailable", lambda: "not built")
    dispatch.forget_candidates()
    try:
        assert_same_bits(CALLS[name], monkeypatch)
    finally:
        dispatch.forget_candidates()


def test_losses_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_WHOLE", 0)
    monkeypatch.setattr(loss_module, "_BLOCK", 10 * model().vocab_size)
    assert_same_bits(lambda: run(adapted()), monkeypatch)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(("batches", "formats"), [(lambda step: [batch(step)], 1), (padded, 2)])
def test_a_graph_is_built_once_for_each_format_of_a_batch(
    batches: Batches, formats: int, is_recomputed: bool
) -> None:
    built = []

    def loss(trained: Decoder, given: Batch) -> mx.array:
        built.append(given.inputs.shape)
        return next_token_loss(trained, given)

    trained = model()
    if is_recomputed:
        checkpoint_blocks(trained)
    run(trained, batches, loss=loss)
    assert set(built) == {each.inputs.shape for step in range(STEPS) for each in batches(step)}
    assert formats <= len(built) < formats + MOST_GRAPHS


def test_graphs_do_not_outlive_their_run() -> None:
    def trained() -> weakref.ref:
        built = model()
        run(built)
        return weakref.ref(built)

    # at once, since a model's memory may be needed before cycles are looked for
    assert trained()() is None


def test_dropout_differs_from_step_to_step() -> None:
    trained = adapted()
    same = [batch(0)]
    results, _ = run(trained, lambda step: same, optimizer=optim.SGD(0.0))
    assert len({result.loss for result in results}) == STEPS


def test_a_step_that_fails_leaves_model_and_optimizer_as_they_were() -> None:
    trained, optimizer = model(), named_optimizer("adamw", 1e-2)

    def loss(trained: Decoder, given: Batch) -> mx.array:
        is_finite = mx.array(given.weights).max() == 1
        return next_token_loss(trained, given) * mx.where(is_finite, 1.0, mx.inf)

    def batches(step: int) -> list[Batch]:
        whole = batch(step)
        weights = whole.weights * np.float32(2 if step == 3 else 1)
        return [Batch(whole.inputs, whole.targets, weights)]

    with pytest.raises(TrainingError, match="the loss is"):
        run(trained, batches, loss=loss, optimizer=optimizer)
    assert optimizer.state["step"].item() == 3
    results, _ = run(trained, optimizer=optimizer)
    assert all(np.isfinite(result.loss) for result in results)


def test_no_kernel_is_chosen_by_timing() -> None:
    """A resumed run must compute with the kernels that it began with."""
    seen = []

    def loss(trained: Decoder, given: Batch) -> mx.array:
        seen.append(choice._forced.get())
        return next_token_loss(trained, given)

    run(model(), loss=loss)
    assert set(seen) == {choice.DEFAULT}

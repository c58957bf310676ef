"""The plan of a run's memory, beside what MLX then takes."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.errors import BackendError, TrainingError, UsageError
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.platform.device import DeviceInfo
from mlx_mmfree.training import memory, optimizer_step
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.fine_tuning.fine_tune import adapt_layers, plan_fine_tune
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.loop import plan_training
from mlx_mmfree.training.losses import loss as loss_module
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.memory import MemoryPlan, plan_memory, plan_rows
from mlx_mmfree.training.optimizer import AdamW8bit
from mlx_mmfree.training.optimizer_step import OptimizerStep, checkpoint_blocks
from mlx_mmfree.training.run_settings import LoopSettings
from mlx_mmfree.training.samples import Sample, Samples
from mlx_mmfree.training.settings import Settings

needs_extension = pytest.mark.skipif(
    native.unavailable() is not None, reason="the compiled extension reads the operations"
)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 344,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mlgru": {"model_type": "hgrn_bit"},
    "mlgru dense": {"model_type": "hgrn_bit", "linear_class": "dense"},
    "llama": {"model_type": "llama", **HEADS},
    "bitnet": {"model_type": "bitnet", "rope_theta": 500000.0, **HEADS},
}
MB = 10**6


def _model(name: str, *, checkpoints: bool = False, adapters: bool = False) -> Decoder:
    mx.random.seed(3)
    architecture = find(MODELS[name]["model_type"])
    model: Decoder = architecture.build(architecture.config.from_hub(SIZES | MODELS[name]))
    if adapters:
        pack_linears(model)
        adapt_layers(model)
    if checkpoints:
        checkpoint_blocks(model)
    return model


def _batch(rows: int, length: int) -> Batch:
    random = np.random.default_rng(0)
    return Batch.of_rows(random.integers(0, 512, (rows, length + 1), dtype=np.int32))


def _settings(dtype: mx.Dtype | None) -> LoopSettings:
    return LoopSettings(Path("unused"), steps=2, clip_norm=1.0, dtype=dtype)


def _planned(
    model: Decoder,
    batch: Batch,
    optimizer: optim.Optimizer | None = None,
    dtype: mx.Dtype | None = None,
    **options: Any,
) -> MemoryPlan:
    return plan_memory(
        model,
        optim.AdamW(1e-3) if optimizer is None else optimizer,
        next_token_loss,
        batch,
        _settings(dtype),
        processes=DataParallel(),
        **options,
    )


def _measured(
    model: Decoder, optimizer: optim.Optimizer, batches: list[Batch], dtype: mx.Dtype | None
) -> int:
    """The peak of two steps, above what was there before the model."""
    optimizer.init(model.trainable_parameters())
    step = OptimizerStep(
        model,
        _settings(dtype),
        optimizer,
        lambda _: mx.array(1e-3),
        lambda _: batches,
        next_token_loss,
        DataParallel(),
    )
    gc.collect()
    before = mx.get_active_memory()
    mx.eval(model.parameters(), optimizer.state)
    mx.reset_peak_memory()
    for n in range(2):
        step(n)
    return mx.get_peak_memory() - before


@pytest.mark.sample(1)
@needs_extension
@pytest.mark.parametrize(
    ("name", "rows", "length", "options"),
    [
        ("mlgru", 2, 128, {}),
        ("mlgru", 4, 256, {}),
        ("mlgru", 4, 256, {"checkpoints": True}),
        ("mlgru", 2, 64, {"optimizer": AdamW8bit, "parts": 3}),
        ("mlgru", 4, 128, {"adapters": True}),
        ("mlgru", 4, 128, {"dtype": mx.bfloat16}),
        ("mlgru dense", 4, 128, {"optimizer": optim.Adafactor}),
        ("mlgru dense", 8, 64, {"checkpoints": True}),
        ("llama", 2, 256, {}),
        ("llama", 8, 128, {"checkpoints": True, "optimizer": AdamW8bit}),
        ("llama", 4, 128, {"blocks": True}),
        ("mlgru dense", 1, 64, {"optimizer": AdamW8bit, "groups": 2**18}),
        ("llama", 1, 64, {"checkpoints": True, "optimizer": AdamW8bit, "groups": 2**18}),
        ("llama", 1, 32, {"groups": 2**18, "dtype": mx.bfloat16, "optimizer": AdamW8bit}),
        ("bitnet", 4, 128, {}),
        ("bitnet", 4, 128, {"checkpoints": True, "adapters": True}),
    ],
)
def test_the_plan_is_within_15_percent_of_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, name: str, rows: int, length: int, options: dict[str, Any]
) -> None:
    options = dict(options)
    if options.pop("blocks", False):
        monkeypatch.setattr(loss_module, "_WHOLE", 2**16)
        monkeypatch.setattr(loss_module, "_BLOCK", 2**14)
    if size := options.pop("groups", 0):
        monkeypatch.setattr(optimizer_step, "_GROUP", size)
        monkeypatch.setattr("mlx_mmfree.training.optimizer._CHUNK", 2**14)
    optimizer = options.pop("optimizer", optim.AdamW)
    parts, dtype = options.pop("parts", 1), options.pop("dtype", mx.float32)
    batch = _batch(rows, length)
    plan = _planned(
        _model(name, **options), batch, optimizer(learning_rate=1e-3), dtype, parts=parts
    )
    measured = _measured(
        _model(name, **options), optimizer(learning_rate=1e-3), [batch] * parts, dtype
    )
    assert plan.total == pytest.approx(measured, rel=0.15)


def test_the_parts_of_a_plan_are_those_of_the_model() -> None:
    plan = _planned(_model("llama"), _batch(2, 64))
    size = sum(array.nbytes for array in _flat(_model("llama")))
    assert (plan.masters, plan.weights, plan.gradients) == (size, 0, size)
    assert 2 * size <= plan.moments < 2 * size + 100
    assert plan.logits == 2 * 64 * 512 * 4
    assert plan.batch == 3 * 2 * 64 * 4


@needs_extension
def test_a_second_batch_of_a_step_needs_a_gradient_more_and_a_third_nothing() -> None:
    model, batch = _model("mlgru"), _batch(2, 64)
    one, two, three = (_planned(model, batch, parts=parts) for parts in (1, 2, 3))
    assert one.total + one.gradients // 2 < two.total <= one.total + one.gradients
    assert three.total == two.total


def test_adapters_leave_the_other_weights_without_gradients() -> None:
    model = _model("bitnet", adapters=True)
    other = _model("llama")
    plan = _planned(model, _batch(2, 64), companions=[other])
    trained = sum(array.nbytes for array in _flat(model, "trainable_parameters"))
    assert plan.masters == plan.gradients == trained
    assert plan.weights == sum(array.nbytes for array in [*_flat(model), *_flat(other)]) - trained


def test_planning_computes_nothing_and_changes_nothing() -> None:
    model = _model("mlgru")
    before = _flat(model)
    memory = mx.get_active_memory()
    _planned(model, _batch(8, 256), dtype=mx.bfloat16)
    gc.collect()
    assert mx.get_active_memory() - memory < 0.2 * MB
    assert all(old is new for old, new in zip(before, _flat(model), strict=True))


def test_without_the_extension_activations_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arrays: Any) -> None:
        raise BackendError("[native] it was not built")

    monkeypatch.setattr(memory, "graph_of", fail)
    plan = _planned(_model("llama"), _batch(2, 64))
    assert plan.activations is None and plan.total > plan.moments
    assert "activations unknown, as the compiled extension is missing" in str(plan)


def _flat(model: Decoder, kind: str = "parameters") -> list[mx.array]:
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(getattr(model, kind)())]


PLAN = MemoryPlan(
    DeviceInfo("a chip", "cpu", 10**9, None, 8 * 10**8),
    masters=10 * MB,
    weights=0,
    moments=20 * MB,
    gradients=10 * MB,
    activations=1700 * MB,
    logits=5 * MB,
    batch=10**5,
)


def test_a_plan_as_text() -> None:
    assert str(PLAN) == (
        "Planned memory on cpu: 1.74 GB (trained weights 10 MB, moments 20 MB, gradients 10 MB, batch "
        "100 kB, activations 1.7 GB with 5 MB of logits)."
    )
    other = replace(PLAN, device=replace(PLAN.device, backend="metal"))
    assert str(other).startswith("Estimated memory on metal: 1.74 GB")


def test_what_does_not_fit_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    warning = PLAN.warning()
    assert warning is not None and "needs 1.74 GB but a chip has 800 MB for it" in warning
    assert "adamw8bit" in warning
    assert replace(PLAN, activations=700 * MB).warning() is None
    # what the process holds already is in the plan
    monkeypatch.setattr(mx, "get_active_memory", lambda: 100 * MB)
    assert "has 900 MB" in (PLAN.warning() or "")
    limited = replace(PLAN.device, available_bytes=None, working_set_bytes=5 * 10**8)
    assert "has 500 MB" in (replace(PLAN, device=limited).warning() or "")


def test_more_than_all_memory_is_refused_by_its_cause() -> None:
    fits = replace(PLAN, activations=900 * MB)
    fits.check(None, {})
    with pytest.raises(
        UsageError, match=r"the 1 GB of a chip but needs 1\.74 GB for the batch: lower 'batch_"
    ):
        PLAN.check(None, {"hidden_size": 10**6})
    large = replace(fits, moments=1020 * MB)
    sizes = {"hidden_size": 64, "inner": {"intermediate_size": 2**20, "bias": True}}
    named = (
        r"for the 'model', whose largest number is 'intermediate_size', 1,048,576: lower it, or let it "
        r"swap with --memory-limit 2\."
    )
    with pytest.raises(UsageError, match=named):
        large.check(10**9, sizes)
    with pytest.raises(UsageError, match="for the model: take a smaller one, or train adapters"):
        large.check(None, {})
    # as much as the user allows
    large.check(2 * 10**9, sizes)


class _TwoProcesses(DataParallel):
    @property
    def size(self) -> int:
        return 2


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    rule = "'batch_size' must be a multiple of the number of processes, 2, but got 1"
    samples = Samples([Sample([1, 2, 3], 0)])
    settings = FineTuneSettings("data", batch_size=1)
    with pytest.raises(TrainingError, match=rule):
        plan_fine_tune(_model("mlgru"), {"train": samples}, settings, _TwoProcesses())
    run = Settings(
        output="run", stages=(Stage(1, {}),), model={"model_type": "hgrn_bit"}, batch_size=1
    )
    with pytest.raises(TrainingError, match=rule):
        plan_training(run, _model("mlgru"), _TwoProcesses())


def _bonsai(layers: int, **sizes: int) -> Decoder:
    """Bonsai 27B with so many blocks, adapters on all their matrices, and weights without memory."""
    model: Decoder = skeleton(
        presets()["ternary-bonsai-27b"] | {"num_hidden_layers": layers, **sizes}
    )
    checkpoint_blocks(model)
    adapt_layers(model)
    return model


def _lora_plan(model: Decoder, length: int) -> MemoryPlan:
    return _planned(model, _batch(1, length), optim.Adam(1e-5))


@needs_extension
@pytest.mark.slow
def test_adapters_of_a_27b_model_fit_a_mac_of_32_gb() -> None:
    # half of the memory is for the system and what MLX does not count
    assert 10e9 < _lora_plan(_bonsai(64), 2048).total < 16e9


NARROW = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "vocab_size": 512,
}


@pytest.mark.exhaustive
@needs_extension
def test_memory_of_a_27b_model_is_what_fewer_and_narrower_blocks_take() -> None:
    """Three linear layers and one of attention at a time, each of the kinds that 27B has."""
    measured = {}
    for layers in (4, 8):
        model = _bonsai(layers, **NARROW)
        model.train()
        measured[layers] = _measured(model, optim.Adam(1e-5), [_batch(1, 128)], None)
        planned = _lora_plan(_bonsai(layers, **NARROW), 128).total
        assert planned == pytest.approx(measured[layers], rel=0.15)
    # scaled to the depth of 27B
    deep = measured[4] + 15 * (measured[8] - measured[4])
    assert _lora_plan(_bonsai(64, **NARROW), 128).total == pytest.approx(deep, rel=0.15)


@needs_extension
@pytest.mark.parametrize("parts", [1, 2])
def test_a_plan_of_many_rows_is_the_one_of_fewer_continued(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals a plan of all rows, which takes long where logits are computed in many blocks."""
    monkeypatch.setattr(loss_module, "_WHOLE", 2**15)
    monkeypatch.setattr(loss_module, "_BLOCK", 2**13)
    monkeypatch.setattr(memory, "_PLANNED_LOGITS", 2**19)
    model, counts = _model("llama"), []

    def batch_of(rows: int) -> Batch:
        counts.append(rows)
        return _batch(rows, 32)

    def plan(batch: Batch) -> MemoryPlan:
        # the free memory of the machine changes
        return replace(
            _planned(model, batch, parts=parts), device=DeviceInfo("a", "cpu", 1, None, None)
        )

    found = plan_rows(plan, batch_of, 100, logits=32 * 512)
    assert counts == [16, 32]
    whole = plan(_batch(100, 32))
    assert found.activations == pytest.approx(whole.activations, rel=0.01)
    assert replace(found, activations=None) == replace(whole, activations=None)
    assert plan_rows(plan, batch_of, 20, logits=32 * 512) == plan(_batch(20, 32))
    assert counts == [16, 32, 20]

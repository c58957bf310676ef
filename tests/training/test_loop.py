"""The loop: resume, accumulation, gradient checkpoints, schedule, failure."""

import json
import math
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import TrainingError, TrainingStopped
from mlx_mmfree.files.reading import MAX_BYTES
from mlx_mmfree.files.writing import try_lock_file
from mlx_mmfree.models import Decoder, hgrn_bit
from mlx_mmfree.training import Settings
from mlx_mmfree.training.batches import Batch
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import build_optimizer, build_schedule, named_optimizer
from mlx_mmfree.training.optimizer_step import checkpoint_blocks, gradient_norm
from mlx_mmfree.training.precision import in_dtype
from mlx_mmfree.training.results import BestWeights, Callback, read_log
from mlx_mmfree.training.run_folder import (
    made_run_folder,
    new_progress,
    own_run_folder,
    read_progress,
    save_checkpoint,
)
from mlx_mmfree.training.stopping import StopRequest
from mlx_mmfree.training.trainer import Trainer
from tests.tolerances import GRADIENT_TOLERANCE, relative_error

pytestmark = pytest.mark.usefixtures("without_curve")

MODEL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}


def _settings(root: Path, **values: Any) -> Settings:
    defaults: dict[str, Any] = {
        "output": "run",
        "model": MODEL,
        "stages": (Stage(1, {"a": 1}),),
        "valid": (),
        "steps": 7,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "steps_per_report": 1,
        "steps_per_eval": 3,
        "save_every": 2,
        "root": root,
    }
    return Settings(**(defaults | values))


def _model(**keys: Any) -> Decoder:
    mx.random.seed(5)
    return hgrn_bit.build(hgrn_bit.Config.from_hub(MODEL | keys))


def _batches(rows: int = 4, parts: int = 1) -> Any:
    def batches(step: int) -> list[Batch]:
        random = np.random.default_rng(step)
        tokens = random.integers(0, 40, (rows, 13)).astype(np.int32)
        return [Batch.of_rows(part) for part in np.split(tokens, parts)]

    return batches


def _validation(model: Decoder) -> dict[str, float]:
    batch = Batch.of_rows(np.arange(24, dtype=np.int32).reshape(2, 12))
    return {"valid_loss": next_token_loss(model, batch).item() / batch.tokens}


def _trainer(model: Decoder, settings: Settings, batches: Any, **options: Any) -> Trainer:
    return Trainer(
        model,
        settings.loop({}),
        build_optimizer(settings),
        build_schedule(settings, 16),
        batches,
        _validation,
        **options,
    )


def _weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


class _Kill(Exception):
    pass


@pytest.mark.sample(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("last_step", [1, 2, 3, 5])
def test_killed_run_resumes_to_the_same_bits(tmp_path: Path, last_step: int) -> None:
    # reports and checkpoints fall on different steps
    want = _model()
    whole = _settings(tmp_path, output="whole", steps_per_report=3)
    want_progress = _trainer(want, whole, _batches()).train()

    def dying(step: int) -> list[Batch]:
        if step == last_step:
            raise _Kill
        return _batches()(step)

    settings = _settings(tmp_path, steps_per_report=3)
    with pytest.raises(_Kill):
        _trainer(_model(), settings, dying).train()
    got = _model()
    progress = _trainer(got, settings, _batches()).train()
    assert (progress["step"], progress["tokens"]) == (7, 7 * 4 * 12)
    assert progress == want_progress
    for name, value in _weights(want).items():
        assert mx.array_equal(_weights(got)[name], value), name
    losses = [
        [r["loss"] for r in read_log(tmp_path / run / "log.jsonl") if "loss" in r]
        for run in ("run", "whole")
    ]
    assert losses[0] == losses[1]


def test_what_belongs_to_a_checkpoint_is_there_before_it(tmp_path: Path) -> None:
    """A run that is killed in between resumes before the step, and so writes both."""
    settings = _settings(tmp_path)
    saved: list[int] = []

    class Watch(Callback):
        def on_save(self, step: int) -> None:
            progress = read_progress(tmp_path / "run")
            assert (0 if progress is None else progress["step"]) < step
            saved.append(step)
            if saved == [2, 4]:
                raise _Kill

    with pytest.raises(_Kill):
        _trainer(_model(), settings, _batches(), callbacks=[Watch()]).train()
    _trainer(_model(), settings, _batches(), callbacks=[Watch()]).train()
    assert saved == [2, 4, 4, 6, 7]


@pytest.mark.parametrize("is_before", [True, False])
def test_kill_while_a_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    _trainer(_model(), _settings(tmp_path), _batches()).train()
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if is_before:
            raise _Kill
        return rename(self, target)

    with monkeypatch.context() as patched:
        # a killed process tidies nothing up
        patched.setattr("mlx_mmfree.files.writing._settle", lambda *_: None)
        patched.setattr(Path, "rename", killed)
        with pytest.raises(_Kill):
            save_checkpoint(
                tmp_path / "run", _model(), optim.SGD(0.0), new_progress({}) | {"step": 8}
            )
            raise _Kill
    progress = read_progress(tmp_path / "run")
    assert progress is not None and progress["step"] == (7 if is_before else 8)


def test_kill_between_two_checkpoints(tmp_path: Path) -> None:
    _trainer(_model(), _settings(tmp_path), _batches()).train()
    stage = tmp_path / "run" / f".checkpoint.{1:016x}.mmfree"
    (stage / "new").mkdir(parents=True)
    (tmp_path / "run/checkpoint").rename(stage / "old")
    progress = read_progress(tmp_path / "run")
    assert progress is not None and progress["step"] == 7
    assert not stage.exists()


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    _trainer(_model(), _settings(tmp_path), _batches()).train()
    message = r"other values of learning_rate, steps\. Resume with the same settings"
    with pytest.raises(TrainingError, match=message):
        settings = _settings(tmp_path, steps=9, learning_rate=1e-3)
        _trainer(_model(), settings, _batches()).train()


def test_a_finished_run_goes_on_to_more_steps(tmp_path: Path) -> None:
    _trainer(_model(), _settings(tmp_path), _batches()).train()
    progress = _trainer(_model(), _settings(tmp_path, steps=9), _batches()).train()
    assert (progress["step"], progress["settings"]["steps"]) == (9, 9)
    log = read_log(tmp_path / "run/log.jsonl")
    assert [r["step"] for r in log if "loss" in r] == list(range(1, 10))
    assert [r["step"] for r in log if r.get("extended_to") == 9] == [7]
    rates = [r["learning_rate"] for r in log if "loss" in r]
    assert rates[8] == pytest.approx(build_schedule(_settings(tmp_path, steps=9), 16)(8).item())
    for steps in (8, 9):
        finished = _trainer(_model(), _settings(tmp_path, steps=steps), _batches())
        if steps == 9:
            assert finished.train()["step"] == 9
        else:
            with pytest.raises(TrainingError, match="other values of steps"):
                finished.train()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, number: int) -> None:
    want = _model()
    _trainer(want, _settings(tmp_path, output="whole"), _batches()).train()
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def stopping(step: int) -> list[Batch]:
        if step == 2:
            os.kill(os.getpid(), number)
        return _batches()(step)

    with pytest.raises(TrainingStopped, match=r"after step 3 of 7; its state is kept in") as stop:
        _trainer(_model(), _settings(tmp_path, save_every=50), stopping).train()
    assert stop.value.status == 128 + number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    progress = read_progress(tmp_path / "run")
    assert progress is not None and progress["step"] == 3
    got = _model()
    _trainer(got, _settings(tmp_path, save_every=50), _batches()).train()
    for name, value in _weights(want).items():
        assert mx.array_equal(_weights(got)[name], value), name


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    def stopping(step: int) -> list[Batch]:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return _batches()(step)

    with pytest.raises(KeyboardInterrupt) as stop:
        _trainer(_model(), _settings(tmp_path), stopping).train()
    assert not isinstance(stop.value, TrainingStopped)
    assert read_progress(tmp_path / "run") is None


def _in_a_process(work: Callable[[Path], None], folder: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(work, folder).result()


def _fill_disk(size: int) -> None:
    """From now on no file of this process, its output's included, grows beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _train_until_full(folder: Path) -> None:
    def filling(step: int) -> list[Batch]:
        if step == 3:
            _fill_disk(10_000)
        return _batches()(step)

    _trainer(_model(), _settings(folder), filling).train()


def _keep_best_until_full(folder: Path) -> None:
    best = BestWeights(_model(), folder / "best.safetensors")
    best.on_best(1)
    (folder / "kept").write_bytes((folder / "best.safetensors").read_bytes())
    _fill_disk(1000)
    best.on_best(2)


def test_a_full_disk_keeps_the_last_state(tmp_path: Path) -> None:
    whole = _model()
    _trainer(whole, _settings(tmp_path, output="whole"), _batches()).train()
    message = r"run' cannot be written: File too large; the state of step 2 is kept in"
    with pytest.raises(TrainingError, match=message):
        _in_a_process(_train_until_full, tmp_path)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoint", "log.jsonl"}
    got = _model()
    _trainer(got, _settings(tmp_path), _batches()).train()
    for name, value in _weights(whole).items():
        assert mx.array_equal(_weights(got)[name], value), name


def test_best_weights_that_cannot_be_written_leave_the_old_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot be written: File too large; nothing had been"):
        _in_a_process(_keep_best_until_full, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best.safetensors", "kept"}
    assert (tmp_path / "best.safetensors").read_bytes() == (tmp_path / "kept").read_bytes()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = "file/run' cannot be written: Not a directory; nothing"
    with ExitStack() as stack, pytest.raises(TrainingError, match=message):
        stack.enter_context(made_run_folder(tmp_path / "file/run"))


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    link = tmp_path / "link"
    link.symlink_to(run)

    def refused(folder: Path) -> str:
        with pytest.raises(TrainingError) as caught, own_run_folder(folder):
            pass
        return str(caught.value)

    with own_run_folder(run), own_run_folder(link), ThreadPoolExecutor(1) as pool:
        # what this run calls may take its own folder again; another run in the process may not
        message = pool.submit(refused, link).result()
        assert (
            f"'{link}' must be the folder of one run at a time but another process trains"
            in message
        )
        # the other processes of the same run do not write there
        with own_run_folder(run, is_first=False):
            pass
    assert list(run.iterdir()) == []
    with pytest.raises(_Kill), own_run_folder(run):
        raise _Kill
    with own_run_folder(run):
        assert [file.name for file in run.iterdir()] == [".lock"]


def test_a_lock_whose_file_is_gone_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    first = try_lock_file(file)
    assert first is not None and try_lock_file(file) is None
    file.unlink()
    second = try_lock_file(file)
    assert second is not None and try_lock_file(file) is None
    os.close(first)
    assert try_lock_file(file) is None
    os.close(second)
    third = try_lock_file(file)
    assert third is not None
    os.close(third)


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    _trainer(_model(), _settings(tmp_path), _batches()).train()
    (tmp_path / "run/checkpoint/optimizer.safetensors").write_bytes(b"broken")
    with pytest.raises(TrainingError, match="checkpoint' cannot be read"):
        _trainer(_model(), _settings(tmp_path), _batches()).train()


@pytest.mark.parametrize(
    "damage",
    [
        lambda progress: [progress],
        lambda progress: {},
        lambda progress: progress | {"step": "1"},
        lambda progress: progress | {"step": True},
        lambda progress: progress | {"tokens": 1.5},
        lambda progress: progress | {"best_loss": None},
        lambda progress: progress | {"settings": [1]},
        lambda progress: progress | {"unreported": {"loss": 0.0}},
        lambda progress: progress | {"note": "x" * MAX_BYTES},
    ],
)
def test_damaged_progress_is_named(tmp_path: Path, damage: Callable[[Any], Any]) -> None:
    save_checkpoint(tmp_path, nn.Linear(1, 1), optim.SGD(0.0), new_progress({}))
    file = tmp_path / "checkpoint/progress.json"
    progress = json.loads(file.read_text())
    # infinity is an object in JSON
    assert read_progress(tmp_path) == progress | {"best_loss": math.inf}
    file.write_text(json.dumps(damage(progress)))
    with pytest.raises(TrainingError, match=r"checkpoint' cannot be read \(.*Delete it"):
        read_progress(tmp_path)


def test_accumulation_equals_the_larger_batch(tmp_path: Path) -> None:
    # Dense linears: a ternary threshold would turn rounding into jumps.
    models = []
    for parts in (1, 2):
        model = _model(linear_class="dense")
        settings = _settings(tmp_path, output=f"run{parts}", steps=3)
        _trainer(model, settings, _batches(4, parts)).train()
        models.append(_weights(model))
    for name, value in models[0].items():
        assert relative_error(models[1][name], value) <= 1e-3, name


def test_gradients_are_clipped_to_a_length(tmp_path: Path) -> None:
    moved, norms = [], []
    for clip_norm in (0.0, 0.01):
        model = _model()
        before = _weights(model)
        run = f"run{clip_norm}"
        settings = _settings(tmp_path, output=run, steps=1, warmup_steps=0, clip_norm=clip_norm)
        Trainer(
            model, settings.loop({}), optim.SGD(0.0), lambda step: mx.array(1.0), _batches()
        ).train()
        change = [value - before[name] for name, value in _weights(model).items()]
        moved.append(math.sqrt(sum(c.square().sum().item() for c in change)))
        norms.append(read_log(tmp_path / run / "log.jsonl")[1]["gradient_norm"])
    assert norms[0] == norms[1] > 0.1
    assert moved == pytest.approx([norms[0], 0.01], rel=1e-3)


def test_masked_tokens_and_padding_are_not_learned() -> None:
    rows = np.random.default_rng(0).integers(1, 40, (2, 13)).astype(np.int32)
    whole = Batch.of_rows(rows)
    padding = np.zeros((2, 3), np.int32)
    valid = np.arange(15)[None].repeat(2, axis=0) < 12
    weights = np.concatenate([whole.weights, padding], axis=1).astype(np.float32)
    padded = Batch(
        np.concatenate([whole.inputs, padding], axis=1),
        np.concatenate([whole.targets, padding], axis=1),
        weights,
        valid,
    )
    model = _model()
    want, wanted = nn.value_and_grad(model, next_token_loss)(model, whole)
    loss, got = nn.value_and_grad(model, next_token_loss)(model, padded)
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    got = dict(tree_flatten(got))
    for name, value in tree_flatten(wanted):
        assert relative_error(got[name], value) <= GRADIENT_TOLERANCE, name
    half = replace(padded, weights=weights * (np.arange(15) < 6))
    parts = [half, replace(padded, weights=weights - half.weights)]
    assert sum(part.tokens for part in parts) == padded.tokens
    losses = [next_token_loss(model, part).item() for part in parts]
    assert sum(losses) == pytest.approx(loss.item(), rel=1e-5)


def test_gradient_checkpoints_take_less_memory() -> None:
    batch = Batch.of_rows(np.zeros((2, 129), np.int32))
    peaks = []
    for is_checkpointed in (False, True):
        model = _model(num_hidden_layers=8, hidden_size=64)
        if is_checkpointed:
            checkpoint_blocks(model)
        mx.eval(model.parameters())
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(nn.value_and_grad(model, next_token_loss)(model, batch))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < 0.5 * peaks[0]


def test_patience_without_a_validation_is_refused(tmp_path: Path) -> None:
    settings = _settings(tmp_path, patience=2).loop({})
    with pytest.raises(
        TrainingError, match="'patience' must be 0 where nothing is validated but got 2"
    ):
        Trainer(_model(), settings, optim.SGD(0.0), lambda step: mx.array(1.0), _batches())


def test_training_without_trainable_parameters_is_refused(tmp_path: Path) -> None:
    model = _model()
    model.freeze()
    with pytest.raises(TrainingError, match="must have trainable parameters"):
        _trainer(model, _settings(tmp_path), _batches())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("linear_class", ["ternary", "dense"])
def test_gradient_checkpoints_change_no_bit(linear_class: str, dtype: mx.Dtype) -> None:
    tokens = Batch.of_rows(np.arange(26, dtype=np.int32).reshape(2, 13))
    plain, recomputed = _model(linear_class=linear_class), _model(linear_class=linear_class)
    checkpoint_blocks(recomputed)
    (want_loss, want), (loss, got) = (
        nn.value_and_grad(model, in_dtype(next_token_loss, model, dtype))(model, tokens)
        for model in (plain, recomputed)
    )
    assert loss.item() == want_loss.item()
    got = dict(tree_flatten(got))
    for name, value in tree_flatten(want):
        assert mx.array_equal(got[name], value), name


def test_loss_falls(tmp_path: Path) -> None:
    fixed = _batches()(0)
    settings = _settings(tmp_path, steps=40, warmup_steps=4)
    _trainer(_model(), settings, lambda step: fixed).train()
    losses = [r["loss"] for r in read_log(tmp_path / "run/log.jsonl") if "loss" in r]
    assert losses[-1] < 0.6 * losses[0]


def test_loss_that_is_not_finite_stops_and_keeps_the_last_state(tmp_path: Path) -> None:
    model = _model()

    def poisoned(step: int) -> list[Batch]:
        if step == 5:
            model.norm.weight = mx.full(model.norm.weight.shape, math.nan)
        return _batches()(step)

    with pytest.raises(
        TrainingError, match=r"loss is nan .* at step 5; the state of step 4 is kept in"
    ):
        _trainer(model, _settings(tmp_path), poisoned).train()
    saved = mx.load(str(tmp_path / "run/checkpoint/model.safetensors"))
    assert all(mx.isfinite(value).all().item() for value in saved.values())
    assert json.loads((tmp_path / "run/checkpoint/progress.json").read_text())["step"] == 4


def test_a_state_that_was_never_saved_is_not_spoken_of(tmp_path: Path) -> None:
    model = _model()
    model.norm.weight = mx.full(model.norm.weight.shape, math.nan)
    with pytest.raises(TrainingError, match=r"at step 0; nothing had been saved yet\. Lower"):
        _trainer(model, _settings(tmp_path), _batches()).train()


def test_schedule_warms_up_and_decays(tmp_path: Path) -> None:
    settings = _settings(tmp_path, steps=100, warmup_steps=10, learning_rate=1.0)
    schedule = build_schedule(settings, 16)
    rates = [schedule(step).item() for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == pytest.approx(1.0)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    want = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 45 / 90))
    assert rates[55] == pytest.approx(want, rel=1e-5)


def test_norm_of_a_large_gradient() -> None:
    gradient = {"a": mx.full((2**25,), 0.5), "b": [mx.full((3,), 2.0, mx.bfloat16)]}
    want = math.sqrt(0.25 * 2**25 + 12)
    assert gradient_norm(gradient).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2**25, 100])
def test_adafactor_measures_large_matrices_right(size: int) -> None:
    optimizer: Any = named_optimizer("adafactor", 1e-3)
    layer = nn.Module()
    layer.weight = mx.full((size,), 0.5)
    optimizer.update(layer, {"weight": mx.full((size,), 0.1)})
    # a step of the learning rate times the root mean square of the weights
    assert 0.5 - layer.weight[0].item() == pytest.approx(1e-3 * 0.5, rel=1e-3)


def test_inverse_sqrt_is_the_schedule_of_the_paper(tmp_path: Path) -> None:
    settings = _settings(
        tmp_path, schedule="inverse_sqrt", learning_rate=None, steps=50, warmup_steps=8
    )
    schedule = build_schedule(settings, 512)
    for step in (1, 2, 7, 8, 9, 20, 50):
        want = 512**-0.5 * min(step**-0.5, step * 8**-1.5)
        assert schedule(step - 1).item() == pytest.approx(want, rel=1e-6)
    # a learning rate is that at the end of the warm-up
    given = build_schedule(replace(settings, learning_rate=0.3), 512)
    assert given(7).item() == pytest.approx(0.3)
    with pytest.raises(TrainingError, match="'warmup_steps' must be positive with inverse_sqrt"):
        replace(settings, warmup_steps=0)


def test_signals_mean_what_they_did_before_once_a_run_has_ended() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

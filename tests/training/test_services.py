"""The log at other services, written by their own packages, without a network."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.optimizer import build_optimizer, build_schedule
from mlx_mmfree.training.results import Callback
from mlx_mmfree.training.services import TensorBoardReport, WandbReport
from mlx_mmfree.training.trainer import Trainer
from tests.training.test_loop import _batches, _model, _settings, _validation

TRAIN = {"step": 2, "tokens": 200, "loss": 1.5}
VALID = {"step": 2, "tokens": 200, "valid_loss": 1.25, "zero_trits": [0.25, 0.5]}


def _reported(report: Any, begin: int = 0) -> None:
    report.on_begin(begin)
    report.on_train(TRAIN)
    report.on_validation(VALID)
    report.on_end()


def _reported_by_a_run(folder: Path, *callbacks: Callback) -> None:
    """Trains for two steps, with a validation before the first."""
    settings = _settings(folder, steps=2, warmup_steps=0, steps_per_report=1, steps_per_eval=1)
    loop = replace(settings.loop({}), validates_first=True)
    optimizer, schedule = build_optimizer(settings), build_schedule(settings, 16)
    Trainer(
        _model(), loop, optimizer, schedule, _batches(), _validation, callbacks=callbacks
    ).train()


@pytest.mark.report
def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _reported(TensorBoardReport(tmp_path / "run", {"seed": 3}))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    scalars = {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    assert scalars == {
        "tokens": [(2, 200.0), (2, 200.0)],
        "loss": [(2, 1.5)],
        "valid_loss": [(2, 1.25)],
        "zero_trits/000": [(2, 0.25)],
        "zero_trits/001": [(2, 0.5)],
    }
    [text] = events.Tensors("settings/text_summary")
    assert b"| seed | 3 |" in text.tensor_proto.string_val[0]


@pytest.mark.report
def test_tensorboard_has_the_validation_before_the_first_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _reported_by_a_run(tmp_path, TensorBoardReport(tmp_path, {}))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [0, 1, 2]
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


@pytest.mark.report
def test_what_a_resumed_run_repeats_is_shown_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _reported(TensorBoardReport(tmp_path, {}))
    _reported(TensorBoardReport(tmp_path, {}), begin=1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2]


@pytest.mark.report
def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    folder = tmp_path / "run"
    folder.mkdir()
    _reported(WandbReport("cats", folder, {"seed": 3}))
    wandb.teardown()  # its service may write the file after the run's end
    [written] = (folder / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    for name in (b"valid_loss", b"zero_trits/001", b"cats", b"seed"):
        assert name in content


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("wandb", lambda folder: WandbReport(None, folder, {})),
        ("tensorboardX", lambda folder: TensorBoardReport(folder, {})),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, make: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        TrainingError, match=rf"is not installed. Install it: pip install {module}$"
    ):
        make(tmp_path)


class _Reported(Callback):
    def __init__(self, calls: list[str], error: Exception | None = None):
        self.calls, self._error = calls, error

    def on_begin(self, step: int) -> None:
        self.calls.append("begin")
        if self._error is not None:
            raise self._error

    def on_train(self, record: Any) -> None:
        self.calls.append("train")

    def on_validation(self, record: Any) -> None:
        self.calls.append("validation")

    def on_best(self, step: int) -> None:
        self.calls.append("best")

    def on_save(self, step: int) -> None:
        self.calls.append("save")

    def on_end(self) -> None:
        self.calls.append("end")


def test_the_start_is_reported_first_and_the_end_last(tmp_path: Path) -> None:
    reported = _Reported([])
    _reported_by_a_run(tmp_path, reported)
    assert reported.calls[:2] == ["begin", "validation"]
    assert reported.calls[-1] == "end" and reported.calls.count("end") == 1


def test_only_what_began_is_ended(tmp_path: Path) -> None:
    first, second, third = _Reported([]), _Reported([], ValueError("no")), _Reported([])
    with pytest.raises(ValueError, match="no"):
        _reported_by_a_run(tmp_path, first, second, third)
    assert (first.calls, second.calls, third.calls) == (["begin", "end"], ["begin"], [])
    assert not (tmp_path / "run/log.jsonl").exists()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])"),
        OSError(28, "No space left on device"),
        RuntimeError(),
    ],
)
@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_a_service_that_does_not_start_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str, error: Exception
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=fail))
    report: Callback = TensorBoardReport(tmp_path, {})
    if service == "wandb":
        report = WandbReport(None, tmp_path, {})
    with pytest.raises(TrainingError, match=f"'report_to' {service} does not start: ") as caught:
        _reported_by_a_run(tmp_path, report)
    assert "\n" not in str(caught.value)
    assert " ".join(str(error).split()).rstrip(".") in str(caught.value)


@pytest.mark.report
def test_a_folder_of_events_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with pytest.raises(
        TrainingError, match=r"does not start: .*Not a directory.* Check the folder"
    ):
        _reported(TensorBoardReport(tmp_path, {}))


@pytest.mark.report
def test_wandb_without_a_login_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(TrainingError, match=r"wandb does not start: .* Run 'wandb login', or set"):
        _reported(WandbReport(None, tmp_path, {}))

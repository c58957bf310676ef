"""The log at other services, written by their own packages, without a network."""

from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.reports.services import TensorBoardReport, WandbReport

TRAIN = {"step": 2, "tokens": 200, "loss": 1.5}
VALID = {"step": 2, "tokens": 200, "valid_loss": 1.25, "zero_trits": [0.25, 0.5]}


def _told(report: Any, begin: int = 0) -> None:
    report.on_begin(begin)
    report.on_train(TRAIN)
    report.on_validation(VALID)
    report.on_end()


@pytest.mark.report
def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _told(TensorBoardReport(tmp_path / "run", {"seed": 3}))
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
def test_what_a_resumed_run_repeats_is_shown_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _told(TensorBoardReport(tmp_path, {}))
    _told(TensorBoardReport(tmp_path, {}), begin=1)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2]


@pytest.mark.report
def test_wandb_writes_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    folder = tmp_path / "run"
    folder.mkdir()
    _told(WandbReport("cats", folder, {"seed": 3}))
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
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(
        TrainingError, match=rf"is not installed. Install it: pip install {module}$"
    ):
        make(tmp_path)

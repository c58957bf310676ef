"""The log of a run and its curve."""

import sys
from pathlib import Path

import pytest

from mlx_mmfree.training.log import RunLog, plot_curve, read_log


def _write(path: Path, steps: range) -> None:
    log = RunLog(path, steps.start - 1)
    for step in steps:
        log.write(step=step, tokens=step * 100, loss=5.0 / step)
    log.write(step=steps[-1], tokens=steps[-1] * 100, valid_loss=1.0)


def test_records_past_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 6))
    _write(path, range(4, 8))
    assert [r["step"] for r in read_log(path) if "loss" in r] == [1, 2, 3, 4, 5, 6, 7]


def test_last_line_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 4))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [r["step"] for r in read_log(path)] == [1, 2, 3, 3]


@pytest.mark.plot
def test_curve_is_a_picture(tmp_path: Path) -> None:
    _write(tmp_path / "log.jsonl", range(1, 6))
    assert plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    _write(tmp_path / "log.jsonl", range(1, 6))
    assert not plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")

"""The log of a run and its curve."""

import sys
from pathlib import Path

import pytest

from mlx_mmfree.training.log import RunLog, plot_curve, read_log, token_unit


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


@pytest.mark.parametrize("line", ["3", "[1]", "null", '"step"', "1" * 99])
def test_a_line_that_is_no_record_ends_the_log(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log.jsonl"
    _write(path, range(1, 4))
    path.write_text(path.read_text() + f'{line}\n{{"step": 4}}\n')
    assert [r["step"] for r in read_log(path)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("most", "unit"),
    [
        (0, (1, "tokens")),
        (1_999, (1, "tokens")),
        (2_000, (1e3, "thousand tokens")),
        (10_600_000, (1e6, "million tokens")),
        (5_000_000_000, (1e9, "billion tokens")),
    ],
)
def test_units_fit_the_run(most: int, unit: tuple[float, str]) -> None:
    assert token_unit(most) == unit


@pytest.mark.plot
def test_a_curve_without_numbers_is_drawn(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl", 0)
    assert plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")
    log.write(step=1, tokens=100, loss=float("nan"))
    assert plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")


@pytest.mark.plot
def test_curve_is_a_picture(tmp_path: Path) -> None:
    _write(tmp_path / "log.jsonl", range(1, 6))
    assert plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    _write(tmp_path / "log.jsonl", range(1, 6))
    assert not plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png")

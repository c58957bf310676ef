"""The log of a run."""

from pathlib import Path

import pytest

from mlx_mmfree.training.results import RunLog, read_log


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

"""Progress is a bar on a terminal and whole lines elsewhere, and one file shows all of it."""

import io
import re
import sys
from pathlib import Path

import pytest

import mlx_mmfree
from mlx_mmfree.platform import progress
from mlx_mmfree.platform.progress import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0)
    with Progress("training", 4, "step", initial=1) as bar:
        bar.update()
        bar.set_postfix_str("loss 3.1", refresh=False)
        bar.update()
    with Progress("reading", 4_000_000, "B") as bar:
        bar.update(1_000_000)
    lines = capsys.readouterr().err.splitlines()
    shapes = (
        r"training: 25 % \(1 of 4\), .* elapsed, .* left",
        r"training: 50 % \(2 of 4\), .* step/s, \d\d:\d\d elapsed, \d\d:\d\d left",
        r"training: 75 % \(3 of 4\), .* step/s, \d\d:\d\d elapsed, \d\d:\d\d left, loss 3.1",
        r"reading: 0 % \(0.00 of 4.00M\), .*",
        r"reading: 25 % \(1.00M of 4.00M\), .*B/s, .* elapsed, .* left",
    )
    assert len(lines) == len(shapes)
    assert all(re.fullmatch(shape, line) for shape, line in zip(shapes, lines, strict=True)), lines


def test_what_is_short_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("training", 4, "step") as bar:
        bar.update(4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("interval", [0, 30])
def test_a_bar_on_a_terminal(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", interval)
    monkeypatch.setattr(sys, "stderr", Screen())
    with Progress("training", 4, "step") as bar:
        bar.update(4)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert shown.startswith("\rtraining:   0%|") and "100%|" in shown and shown.endswith("\n")


@pytest.mark.parametrize("stream", [Screen(), io.StringIO(), None])
def test_nothing_is_shown(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0)
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("training", 4, is_shown=stream is None) as bar:
        bar.update(4)
    assert stream is None or stream.getvalue() == ""


def test_one_file_shows_progress() -> None:
    """So that no work is silent where stderr is no terminal."""
    root = Path(mlx_mmfree.__file__).parent
    users = [f for f in root.rglob("*.py") if re.search(r"from tqdm|import tqdm", f.read_text())]
    # the second one is asked to show nothing
    assert sorted(file.name for file in users) == ["download.py", "progress.py"]

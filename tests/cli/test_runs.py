"""`mmfree runs`: several logs in one table, as JSON and in one picture."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli.parts import picture_flag
from mlx_mmfree.cli.runs import main


def _run(folder: Path, losses: list[float], **settings: Any) -> Path:
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [{"step": 0, "settings": {"seed": 1, **settings}}]
    for step, loss in enumerate(losses, 1):
        record = {"step": step, "tokens": 1000 * step, "loss": loss + 1}
        records.append(record | {"tokens_per_second": 10.0 * step, "peak_memory_bytes": 2_000_000})
        records.append({"step": step, "tokens": 1000 * step, "valid_loss": loss})
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    one = _run(tmp_path / "one", [3.0, 1.5, 2.0], model={"layers": 2, "dims": 8})
    two = _run(tmp_path / "two", [2.5], model={"layers": 4, "dims": 8}, rate=0.1)
    return [str(one), str(two)]


def test_table(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(runs) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["one", "3", "3,000", "3.0000", "1.5000", "2", "20", "2.0", "MB"]
    assert lines[2] == ["two", "1", "1,000", "3.5000", "2.5000", "1", "10", "2.0", "MB"]
    assert lines[4:] == [
        ["Settings", "that", "differ:"],
        ["one", "two"],
        ["model.layers", "2", "4"],
        ["rate", "-", "0.1"],
    ]


def test_one_run_differs_from_none(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(runs[:1]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_json(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*runs, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["one", "two"]
    assert (report["one"]["best_loss"], report["one"]["best_step"]) == (1.5, 2)
    assert report["two"]["settings"]["model"] == {"layers": 4, "dims": 8}


def test_runs_of_the_same_name_are_distinguished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(_run(tmp_path / parent / "run", [1.0])) for parent in ("a", "b")]
    assert main(paths) == 0
    out = capsys.readouterr().out
    assert all(path in out for path in paths)


def test_a_log_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "mine.jsonl"
    far = "1" + "0" * 400
    log.write_text(
        '{"step": 0}\n{"step": "x", "tokens": null, "loss": "y", "valid_loss": [1]}\n'
        f'{{"step": {far}, "tokens": {far}, "loss": {far}, "valid_loss": NaN}}\n'
    )
    assert main([str(log)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["mine", "0", "0", *"-----"]


@pytest.mark.plot
def test_picture(runs: list[str], tmp_path: Path) -> None:
    assert main([*runs, "--picture", str(tmp_path / "runs.png")]) == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, reason in ((None, "needs the package matplotlib"), ("", "is a folder")):
        monkeypatch.setattr(picture_flag, "find_spec", lambda name, found=found: found)
        assert main([*runs, "--picture", runs[0]]) == 2
        shown = capsys.readouterr()
        assert "[runs] --picture" in shown.err and reason in shown.err and not shown.out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "must be the folder of a run but has no log.jsonl"),
        ("", "must be the log of a run but its first line is not"),
        ("[1]", "must be the log of a run but its first line is not"),
    ],
)
def test_what_is_no_run(
    tmp_path: Path, content: str | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1

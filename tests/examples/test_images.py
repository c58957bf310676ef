"""The benchmark of image models: what it prints, what it compares, and which flags it refuses."""

import json
import re
from pathlib import Path
from typing import Any

import images
import pytest
from images import OWN, TIMM, Run, main

from mlx_mmfree.errors import MeasurementError
from tests.hub.timm_models import DATA

FOLDER = str(DATA / "edgenext")
QUICK = [FOLDER, "--quick"]


@pytest.fixture(autouse=True)
def in_this_process(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "measure", here)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--json", "--threads", "1", "2", "--batch-sizes", "1", "3"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["settings"]["rounds"] == shown["settings"]["processes"] == 1
    found = [(figure["threads"], figure["batch_size"]) for figure in shown["metrics"]]
    assert found == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for figure in shown["metrics"]:
        assert (figure["model"], figure["program"]) == (FOLDER, OWN)
        assert figure["best"] == figure["images_per_second"] > 0


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == [
        *("model", "threads", "batch", "mlx_mmfree,", "images/s", "mlx_mmfree,", "best")
    ]
    assert [row.split()[:3] for row in rows] == [[FOLDER, "1", "1"], [FOLDER, "1", "8"]]


def test_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--markdown", "--batch-sizes", "1"]) == 0
    heading, ruler, row = capsys.readouterr().out.splitlines()
    assert heading == "| model | 1 thread, batch 1 |"
    assert ruler == "| --- | ---: |"
    assert re.fullmatch(rf"\| `{re.escape(FOLDER)}` \| [\d.]+ \|", row)


def test_a_named_architecture_gets_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def measure(program: str, folder: Path, settings: Any, threads: int) -> Run:
        folders.append(folder)
        assert (folder / "model.safetensors").exists()
        described = json.loads((folder / "config.json").read_text())
        assert described["architecture"] == "edgenext_xx_small"
        return Run({str(size): [0.5] for size in settings.batch_sizes}, [1.0])

    monkeypatch.setattr(images, "_measure", measure)
    assert main(["edgenext_xx_small", "--quick"]) == 0
    assert not folders[0].exists()


def test_the_ratio_is_that_of_medians(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {OWN: [0.5, 1.0, 2.0], TIMM: [2.0, 3.0, 4.0]}

    def measure(program: str, folder: Path, settings: Any, threads: int) -> Run:
        return Run({"1": seconds[program]}, [1.0, 2.0])

    monkeypatch.setattr(images, "_measure", measure)
    monkeypatch.setattr(images, "find_spec", lambda name: True)
    assert main([*QUICK, "--compare", "timm", "--batch-sizes", "1"]) == 0
    *_, ratio, best = capsys.readouterr().out.splitlines()[1].split()
    assert (float(ratio), float(best)) == (3.0, 4.0)


@pytest.mark.parametrize("wrong", [2.01, float("nan")])
def test_other_logits_are_refused(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logits = {OWN: [1.0, wrong], TIMM: [1.0, 2.0]}

    def measure(program: str, folder: Path, settings: Any, threads: int) -> Run:
        return Run({"1": [1.0], "8": [1.0]}, logits[program])

    monkeypatch.setattr(images, "_measure", measure)
    monkeypatch.setattr(images, "find_spec", lambda name: True)
    assert main([*QUICK, "--compare", "timm"]) == 2
    assert "must be timm's but differ by" in capsys.readouterr().err


@pytest.mark.interop
def test_beside_timm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--compare", "timm", "--batch-sizes", "1", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert [figure["program"] for figure in metrics] == [OWN, TIMM]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compare", "torch"], "choose from"),
        (["--rounds", "0"], "--rounds"),
        (["--json", "--markdown"], "not allowed with"),
    ],
)
def test_what_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *flags]) == 2
    assert words in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["./nothing", "--quick"]) == 2
    assert "./nothing" in capsys.readouterr().err


def test_timm_must_be_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    assert main([*QUICK, "--compare", "timm"]) == 2
    assert "pip install timm" in capsys.readouterr().err


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    settings = images.ImageSettings((1,), (1,), 1, 1)
    with pytest.raises(MeasurementError, match="nothing"):
        images._measure(OWN, Path("nothing"), settings, 1)

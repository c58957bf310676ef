"""The script that kills training runs tries every option, and sees what differs."""

import json
import random
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_mmfree.training.distil.settings import DistilSettings
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings
from mlx_mmfree.training.settings import Settings
from tests.kills import case as cases
from tests.kills import run as script
from tests.kills.case import Refused, differences, draw_case, kill_and_compare
from tests.kills.options import (
    DISTIL,
    DISTIL_OPTIONS,
    LORA,
    LORA_OPTIONS,
    TRAIN,
    TRAIN_OPTIONS,
    Values,
)

# where the run and code of the user lie, and whether there is one
NO_OPTIONS = {"output", "root", "adapter_path", "train", "path", "plugins"}


@pytest.mark.parametrize(
    ("settings", "base", "options"),
    [
        (Settings, TRAIN, TRAIN_OPTIONS),
        (FineTuneSettings, LORA, LORA_OPTIONS),
        (DistilSettings, DISTIL, DISTIL_OPTIONS),
    ],
    ids=["train", "lora", "distil"],
)
def test_every_option_has_its_turn(settings: type, base: Values, options: list[Values]) -> None:
    defaults = {field.name: field.default for field in fields(settings)} | base
    for name in defaults.keys() - NO_OPTIONS:
        assert any(name in option and option[name] != defaults[name] for option in options), name


def _run(folder: Path) -> None:
    folder.mkdir()
    (folder / "curve.png").write_text(folder.name)
    (folder / "weights").write_text("1")
    (folder / "log.jsonl").write_text(
        json.dumps({"step": 1, "loss": 2.0, "tokens_per_second": len(folder.name)}) + "\n"
    )


def _lengthen(path: Path) -> None:
    path.write_text(path.read_text() * 2)


def _change_loss(path: Path) -> None:
    path.write_text(path.read_text().replace("2.0", "2.5"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weights", _lengthen),
        ("weights", Path.unlink),
        ("log.jsonl", _lengthen),
        ("log.jsonl", _change_loss),
    ],
)
def test_each_difference_is_seen(tmp_path: Path, name: str, change: Callable[[Path], None]) -> None:
    runs = tmp_path / "whole", tmp_path / "the other"
    for run in runs:
        _run(run)
    assert differences(*runs) == []
    change(runs[1] / name)
    assert len(differences(*runs)) == 1


def test_a_refused_option_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Refused("no such file")

    monkeypatch.setattr(script, "kill_and_compare", refuse)
    kills, [fault], is_refused = script._turn(0, 0, tmp_path)
    assert (kills, is_refused) == (0, True)
    assert fault.startswith("case 0: train") and fault.endswith("is refused: no such file")


def test_every_run_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    def run(case: object, folder: Path, name: str, seconds: float | None) -> tuple[int, str]:
        limits.append(seconds)
        if not (folder / name).exists():
            _run(folder / name)
        # the first five end before they are killed
        return -signal.SIGKILL if seconds is not None and len(limits) > 5 else 0, ""

    monkeypatch.setattr(cases, "_run", run)
    draw = random.Random(0)
    kills, found = kill_and_compare(draw_case(0, draw), tmp_path, draw)
    assert kills >= 1 and found == []
    assert limits[0] is None is limits[-1]

"""The class of training runs that are killed has every option, and sees what differs."""

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
from tests.fuzz import training_runs
from tests.fuzz.classes import training_kills
from tests.fuzz.training_options import (
    DISTIL,
    DISTIL_OPTIONS,
    LORA,
    LORA_OPTIONS,
    TRAIN,
    TRAIN_OPTIONS,
    Values,
)
from tests.fuzz.training_runs import Case, Refused, differences, draw_case, kill_and_compare

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


def test_an_option_that_is_refused_alone_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Case] = []

    def refuse(case: Case, *_: object) -> None:
        tried.append(case)
        raise Refused("no such file")

    monkeypatch.setattr(training_kills, "kill_and_compare", refuse)
    (tmp_path / "seed.txt").write_text("0")
    with pytest.raises(Refused):
        training_kills.exercise(tmp_path, random.Random(0))
    assert tried == [*draw_case(random.Random(0))]
    assert Refused not in training_kills.CLASS.refusals


def test_every_run_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    kills = 0

    def run(case: object, folder: Path, name: str, seconds: float | None) -> tuple[int, str]:
        nonlocal kills
        limits.append(seconds)
        if not (folder / name).exists():
            _run(folder / name)
        # the first five end before they are killed
        is_killed = seconds is not None and len(limits) > 5
        kills += is_killed
        return -signal.SIGKILL if is_killed else 0, ""

    monkeypatch.setattr(training_runs, "_run", run)
    draw = random.Random(0)
    kill_and_compare(draw_case(draw)[0], tmp_path, draw)
    assert kills >= 1
    assert limits[0] is None is limits[-1]

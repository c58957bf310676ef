"""The script that kills training runs tries every option, and sees what differs."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from mlx_mmfree.training.fine_tune_settings import FineTuneSettings
from mlx_mmfree.training.settings import Settings
from tests.kills.case import differences
from tests.kills.options import LORA, LORA_OPTIONS, TRAIN, TRAIN_OPTIONS, Values

# where the run lies, and whether there is one
NO_OPTIONS = {"output", "root", "adapter_path", "train"}


@pytest.mark.parametrize(
    ("settings", "base", "options"),
    [(Settings, TRAIN, TRAIN_OPTIONS), (FineTuneSettings, LORA, LORA_OPTIONS)],
    ids=["train", "lora"],
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

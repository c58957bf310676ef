"""`mmfree bench`: what it prints, and which flags it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli import main

CONFIG = {
    "model_type": "hgrn_bit",
    "vocab_size": 70,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "--quick", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result: dict[str, Any] = json.loads(shown.out)
    return result


def test_json(capsys: pytest.CaptureFixture[str], config: Path, folder: Path) -> None:
    shown = report(capsys, "--config", str(config), str(config.parent), "--model", str(folder))
    assert set(shown) == {"machine", "products", "models"}
    assert shown["machine"]["threads"] >= 1
    assert [product["rows"] for product in shown["products"]] == [1, 8]
    assert [model["name"] for model in shown["models"]] == [
        f"{config}, random weights",
        f"{config.parent}, random weights",
        str(folder),
    ]


def test_flags_win_over_quick(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    flags = ["--positions", "3", "1", "--prompt-tokens", "5", "--rounds", "2", "--no-products"]
    shown = report(capsys, "--config", str(config), *flags)
    assert shown["products"] == []
    [model] = shown["models"]
    assert [decode["position"] for decode in model["decode"]] == [1, 3]
    assert model["prompt_tokens"] == 5
    assert len(model["prompt_seconds"]) == 2


def test_table(capsys: pytest.CaptureFixture[str], config: Path) -> None:
    assert main(["bench", "--quick", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    for text in ("thread(s)", "memory read:", "256 x 512", "decode after 2:", "prefill of 8:"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--config", "no-such-preset"], "'config' must be one of mmfreelm-370m"),
        (["--revision", "main"], "'revision' must come with 'model'"),
        (["--rounds", "0"], "must be a whole number from 1"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["bench", "--quick", "--no-products", "--json", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert reason in shown.err and shown.err.count("\n") == 1

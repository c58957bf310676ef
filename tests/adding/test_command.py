"""A command is one file: it is listed, completed, run, and its mistakes are one line."""

from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.cli.parts.completion import whole_parser
from tests.hub.checkpoints import GOLDENS

FOLDER = str(GOLDENS / "tokenizer_bpe")


def test_it_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "  count         count the tokens of a text\n" in capsys.readouterr().out


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "--model", FOLDER, "The dog"]) == 0
    assert int(capsys.readouterr().out) > 0


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["count", "--model", str(tmp_path / "none"), "The dog"]) == 2
    assert main(["count", "--mode", FOLDER, "The dog"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_it_is_completed() -> None:
    parser = whole_parser("mmfree count --mo")
    assert parser.parse_args(["count", "--model", "x", "y"]).text == "y"

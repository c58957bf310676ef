"""`demo` names the model in the package wherever a model is named, unless a folder has that name."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from mlx_mmfree import demo, load_model, load_tokenizer
from mlx_mmfree.cli.convert import main as convert
from mlx_mmfree.cli.embed import main as embed
from mlx_mmfree.cli.generate import main as generate
from mlx_mmfree.cli.run import main as run
from mlx_mmfree.cli.translate import main as translate

Captured = pytest.CaptureFixture[str]


def test_commands_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert generate(["--model", "demo", "--prompt", "Once", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 1
    assert run(["demo", "Once", "--max-tokens", "2", "--temp", "0"]) == 0
    assert capsys.readouterr().out == " upon a\n"
    (tmp_path / "texts.txt").write_text("a dog\na cat\n")
    assert embed(["--model", "demo", "--json", str(tmp_path / "texts.txt")]) == 0
    assert convert(["--model", "demo", "--output", str(tmp_path / "out")]) == 0
    assert load_model(tmp_path / "out").dims == load_model("demo").dims


def test_a_command_that_cannot_use_it_says_why(capsys: Captured) -> None:
    assert translate(["--model", "demo", "--text", "Once"]) == 2
    words = "'demo' is a model for continuing a text. Use 'mmfree generate' for it."
    assert words in capsys.readouterr().err


def test_a_folder_of_that_name_goes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("demo").folder == demo.path()
    shutil.copytree(demo.path(), tmp_path / "demo", ignore=shutil.ignore_patterns("*.py"))
    assert load_tokenizer("demo").folder == Path("demo")

"""`mmfree translate` with a tiny Marian model of random weights."""

import json
from pathlib import Path

import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli.translate import main
from tests.hub.marian_folder import OTHERS, SENTENCES, marian_folder

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(marian_folder(tmp_path_factory.mktemp("marian") / "model"))


def test_one_text(model: str, capsys: Captured) -> None:
    assert main(["--model", model, "--text", SENTENCES[0]]) == 0
    first = capsys.readouterr().out
    assert set(first.split()) and set(first) <= set(
        "".join(OTHERS) + "".join(SENTENCES) + "\n<>fradeu"
    )
    assert main(["--model", model, "--text", SENTENCES[0], "--max-tokens", "2"]) == 0
    assert len(capsys.readouterr().out) < len(first)


def test_each_line_of_a_file_whatever_the_batch(
    model: str, capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(SENTENCES))
    found = []
    for size in ("1", "3"):
        flags = ["--data", str(file), "--batch-size", size, "--json"]
        assert main(["--model", model, *flags]) == 0
        found.append(json.loads(capsys.readouterr().out)["translations"])
    assert found[0] == found[1]
    assert [pair["text"] for pair in found[0]] == SENTENCES


def test_the_language_is_the_first_token(model: str, capsys: Captured) -> None:
    texts = []
    for flags in (["--language", "fra"], ["--language", "deu"], []):
        assert main(["--model", model, "--text", SENTENCES[1], *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--model", str(demo.path()), "--text", "a"],
            "--model must turn one text into another but",
        ),
        (["--length-penalty", "-1", "--text", "a"], "--length-penalty must be a number from 0"),
    ],
)
def test_mistakes(model: str, flags: list[str], message: str, capsys: Captured) -> None:
    assert main(["--model", model, *flags]) == 2
    assert message in capsys.readouterr().err

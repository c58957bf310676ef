"""`mmfree embed` with a tiny model of random weights."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import embed, load
from mlx_mmfree.cli.embed import main
from tests.hub.embedder_folder import embedder_folder

Captured = pytest.CaptureFixture[str]
TEXTS = ["The queen gave a robe.", "No."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(embedder_folder(tmp_path_factory.mktemp("embedder") / "model", pooling="lasttoken"))


def test_each_text_gets_its_vector(model: str, tmp_path: Path, capsys: Captured) -> None:
    want = embed(*load(model), TEXTS).tolist()
    assert main(["--model", model, "--text", *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"text": t, "embedding": v} for t, v in zip(TEXTS, want, strict=True)]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join([json.dumps(TEXTS[0]), json.dumps({"text": TEXTS[1]})]))
    assert main(["--model", model, "--data", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["embeddings"] == lines
    files = [tmp_path / f"{n}.txt" for n in range(2)]
    for each, text in zip(files, TEXTS, strict=True):
        each.write_text(text)
    assert main(["--model", model, *map(str, files)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["file"] for each in found] == list(map(str, files))
    assert [each["embedding"] for each in found] == want


def test_similarity_and_prompts(model: str, capsys: Captured) -> None:
    asked = [
        "--model",
        model,
        "--similarity",
        "--prompt-name",
        "query",
        "--pooling",
        "mean",
        "--text",
    ]
    assert main([*asked, *TEXTS, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    vectors = embed(*load(model), TEXTS, pooling="mean", prompt_name="query")
    assert table["texts"] == TEXTS
    assert mx.allclose(mx.array(table["similarity"]), vectors @ vectors.T, atol=1e-6).item()
    assert main([*asked, *TEXTS]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["1", "2", "text"] and rows[0].split()[:2] == ["1", "1.000"]
    assert rows[1].endswith("  No.")


def test_refused(model: str, tmp_path: Path, capsys: Captured) -> None:
    for flags, words in (
        ([], "one of them, but got none"),
        (["--text", "a", "--data", "b"], "but got text and data"),
        ([str(tmp_path / "missing.txt")], "cannot be read"),
        (["--text", "a", "--prompt-name", "passage"], "must be one of the model's prompts"),
        (["--text", ""], "must hold no empty text"),
    ):
        assert main(["--model", model, *flags]) == 2
        assert words in capsys.readouterr().err

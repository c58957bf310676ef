"""`mmfree classify` with a tiny classifier of random weights."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree import demo, load
from mlx_mmfree.cli.classify import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find
from tests.hub.checkpoints import GOLDENS

Captured = pytest.CaptureFixture[str]
LABELS = ["good", "bad", "neither"]


def _folder(folder: Path, **values: object) -> str:
    architecture = find("metaformer")
    mx.random.seed(2)
    given = {
        **architecture.tiny,
        "token_mixer": {"name": "gqa", "num_heads": 4},
        "task": "classifier",
        "vocab_size": 518,
        "initializer_range": 0.5,
        **values,
    }
    model = architecture.build(architecture.config.from_hub(given))
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _folder(tmp_path_factory.mktemp("classifier") / "model", labels=LABELS)


def test_each_text_gets_its_classes(model: str, tmp_path: Path, capsys: Captured) -> None:
    texts = ["The queen gave a robe.", "He wore it, and so on.", "No."]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    assert main(["--model", model, "--texts-file", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["texts"]
    assert [each["text"] for each in found] == texts
    own, tokenizer = load(model)
    for each in found:
        chances = mx.softmax(own(mx.array([tokenizer.encode(each["text"])]))[0]).tolist()
        want = sorted(zip(chances, LABELS, strict=True), reverse=True)
        assert [entry["label"] for entry in each["classes"]] == [label for _, label in want]
        shown = [entry["probability"] for entry in each["classes"]]
        assert shown == pytest.approx([chance for chance, _ in want], rel=1e-5)
    assert main(["--model", model, "--text", texts[0], "--top-k", "1"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["text", "class", "probability"]
    assert line.split()[1] == found[0]["classes"][0]["label"]


def test_classes_without_names_are_numbers(tmp_path: Path, capsys: Captured) -> None:
    model = _folder(tmp_path / "model", num_labels=2)
    assert main(["--model", model, "--text", "A text."]) == 0
    labels = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(labels) == ["0", "1"]


def test_mistakes(model: str, capsys: Captured) -> None:
    for flags, message in (
        (["--model", str(demo.path()), "--text", "a"], "--model must sort texts into classes but"),
        (["--model", model, "--text", "a", "--top-k", "0"], "--top-k"),
    ):
        assert main(flags) == 2
        assert message in capsys.readouterr().err

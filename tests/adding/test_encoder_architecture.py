"""An encoder is one file: what makes sense for it works, the rest is refused with what it is for."""

import json
import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.models import MaskedLM, find
from mlx_mmfree.training import trainer
from tests.hub.checkpoints import GOLDENS

TOKENS = mx.array([[1, 7, 3, 39, 0]])
PURPOSE = "the model must continue texts but MaskedLM is for filling in masked tokens"


@pytest.fixture(scope="module")
def folder(added: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with float masters."""
    architecture = find("fill_in")
    mx.random.seed(0)
    model = architecture.build(architecture.config.from_hub(architecture.tiny))
    folder = tmp_path_factory.mktemp("fill_in") / "model"
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return folder


def test_it_is_loaded_and_packed(folder: Path) -> None:
    model = load_model(folder, packed=False)
    assert isinstance(model, MaskedLM)
    want = model(TOKENS)
    assert want.shape == (1, 5, 518)
    assert mx.allclose(load_model(folder)(TOKENS), want, atol=1e-4)
    # every position sees the last one
    changed = mx.array([[1, 7, 3, 39, 5]])
    assert not mx.array_equal(model(changed)[:, 0], want[:, 0])


def test_padding_changes_nothing(folder: Path) -> None:
    model = load_model(folder)
    padded = mx.concatenate([TOKENS, mx.zeros((1, 2), TOKENS.dtype)], axis=1)
    valid = mx.arange(7)[None] < 5
    assert mx.allclose(model(padded, valid)[:, :5], model(TOKENS), atol=1e-5)


def test_it_is_written_and_converted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    want = load_model(folder)(TOKENS)
    save_model(tmp_path / "packed", load_model(folder))
    assert mx.array_equal(load_model(tmp_path / "packed")(TOKENS), want)
    target = tmp_path / "mlx"
    assert main(["convert", "--model", str(folder), "--mlx-path", str(target)]) == 0
    assert re.search("mlx-lm +no: it has no such architecture", capsys.readouterr().out)
    assert mx.allclose(load_model(target)(TOKENS), want, atol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        ["generate", "-p", "The dog"],
        ["chat"],
        ["perplexity", "--data", "{folder}/config.json"],
        ["lora", "--train", "--data", "{data}", "--adapter-path", "{data}/adapter"],
    ],
    ids=lambda flags: flags[0],
)
def test_what_goes_on_with_a_text_is_refused(
    flags: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "The dog sees the cat."}))
    given = [flag.format(folder=folder, data=tmp_path) for flag in flags]
    assert main([given[0], "--model", str(folder), *given[1:]]) == 2
    shown = capsys.readouterr()
    assert PURPOSE in shown.err and shown.err.count("\n") == 1


def test_it_is_trained_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "plot_run", lambda *_: True)
    (tmp_path / "text.txt").write_text("The dog sees the cat. " * 200)
    (tmp_path / "train.yaml").write_text(
        "output: run\nmodel: {model_type: fill_in, vocab_size: 300, width: 32, heads: 4}\n"
        "stages: [{until: 1.0, weights: {text.txt: 1}}]\nsequence_length: 16\nbatch_size: 2\n"
        "steps: 2\nwarmup_steps: 0\n"
    )
    assert main(["train", "--config", str(tmp_path / "train.yaml")]) == 0
    capsys.readouterr()
    model = str(tmp_path / "run/model")
    assert main(["fill", "--model", model, "--text", "The [MASK] sees the cat.", "--json"]) == 0
    [words] = json.loads(capsys.readouterr().out)["masks"]
    assert len(words) == 5

"""Runs from token files: they belong to a tokenizer, are found again, and go on after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.files.writing import try_lock_file
from mlx_mmfree.training.corpus import token_files
from mlx_mmfree.training.corpus.token_files import _check_ids
from mlx_mmfree.training.corpus.tokenize import find_sources, open_token_file, tokenize
from mlx_mmfree.training.loop import train_model
from mlx_mmfree.training.results import read_log
from mlx_mmfree.training.settings import read_settings
from tests.training.conftest import write_corpus

pytestmark = pytest.mark.usefixtures("without_curve")


def _settings(config: Path, **values: Any) -> Any:
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | values))
    return read_settings(config)


def _tokenized(config: Path, name: str, tokenizer: Path | None = None) -> str:
    """The name of a token file with the documents of a text."""
    output = config.parent / f"{name}-tokens"
    size = 300 if tokenizer is None else None
    sources = find_sources([str(config.parent / f"{name}.txt")])
    tokenize(sources, output, tokenizer, vocab_size=size)
    return f"{name}-tokens/train.tokens"


def _best(config: Path, run: str) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = mx.load(str(config.parent / run / "best.safetensors"))
    return weights


def _losses(config: Path, run: str) -> list[float]:
    return [r["loss"] for r in read_log(config.parent / run / "log.jsonl") if "loss" in r]


def test_token_files_train_as_the_texts_do(config: Path) -> None:
    train_model(_settings(config))
    own = config.parent / "run/tokenizer"
    names = {name: _tokenized(config, name, own) for name in ("train", "more", "valid")}
    stages = [
        {"until": 0.5, "weights": {names["train"]: 1, names["more"]: 2}},
        {"until": 1, "weights": {names["more"]: 1}},
    ]
    settings = _settings(config, output="second", stages=stages, valid=[names["valid"]])
    train_model(settings)
    assert _losses(config, "second") == _losses(config, "run")
    assert not (config.parent / "second/tokenizer").exists()


def test_texts_are_tokenised_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_model(_settings(config))
    made = sorted((config.parent / "run/tokens").iterdir())
    assert len(made) == 3
    before = [path.read_bytes() for path in made]
    # what was damaged is made again, and nothing else is
    made[0].write_bytes(before[0][:-1])
    written = []
    write = token_files.write_token_file

    def count(*arguments: Any, **options: Any) -> Any:
        written.append(1)
        return write(*arguments, **options)

    monkeypatch.setattr(token_files, "write_token_file", count)
    train_model(_settings(config))
    assert sorted((config.parent / "run/tokens").iterdir()) == made
    assert [path.read_bytes() for path in made] == before
    assert len(written) == 1


def test_another_run_is_kept_out(config: Path) -> None:
    run = config.parent / "run"
    run.mkdir()
    lock = try_lock_file(run / ".lock")
    assert lock is not None
    with pytest.raises(TrainingError, match="must be the folder of one run at a time"):
        train_model(_settings(config))
    assert [file.name for file in run.iterdir()] == [".lock"]
    os.close(lock)
    train_model(_settings(config))
    assert not (run / ".lock").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "is empty"), ("\ufeff", "must hold a document but has none")],
    ids=["empty", "byte-order mark"],
)
@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_text_without_documents_is_named(
    config: Path, name: str, content: str, reason: str
) -> None:
    file = config.parent / f"{name}.txt"
    file.write_text(content)
    with pytest.raises(TrainingError, match=rf"'{file}' {reason}"):
        train_model(_settings(config))


def test_another_tokenizer_is_refused(config: Path) -> None:
    first = _tokenized(config, "train")
    write_corpus(config.parent / "more.txt", 5, documents=90)
    second = _tokenized(config, "more")
    stages = [{"until": 1, "weights": {first: 1, second: 1}}]
    # the keys of a YAML file that is written here are sorted
    message = f"'{first}' must hold the ids of the run's tokenizer but was made with another one"
    with pytest.raises(TrainingError, match=message):
        train_model(_settings(config, stages=stages, valid=[]))
    stages = [{"until": 1, "weights": {first: 1}}]
    shutil.rmtree(config.parent / "train-tokens/tokenizer")
    with pytest.raises(TrainingError, match="'tokenizer' must name the folder of the tokenizer"):
        train_model(_settings(config, stages=stages, valid=[]))


def test_files_that_are_no_texts_are_refused(config: Path) -> None:
    (config.parent / "train.jsonl").write_text('{"text": "a"}')
    stages = [{"until": 1, "weights": {"train.jsonl": 1}}]
    with pytest.raises(TrainingError, match="must be a text file or a token file"):
        train_model(_settings(config, stages=stages))


def test_the_vocabulary_of_a_model_covers_that_of_its_tokens(config: Path) -> None:
    name = _tokenized(config, "train")
    model = yaml.safe_load(config.read_text())["model"] | {"vocab_size": 200}
    settings = _settings(config, stages=[{"until": 1, "weights": {name: 1}}], model=model)
    with pytest.raises(TrainingError, match="'vocab_size' must cover the tokenizer's 300 tokens"):
        train_model(settings)


def test_a_tokenizer_may_have_more_tokens_than_the_model(config: Path) -> None:
    train_model(_settings(config))
    folder = config.parent / "run/masters"
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    own = vocabulary["added_tokens"]
    rows = len(vocabulary["model"]["vocab"])
    own.append({**own[-1], "id": rows, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    values = yaml.safe_load(config.read_text())
    values |= {"output": "second", "init_from": "run/masters"}
    del values["model"]
    values.pop("tokenizer", None)
    config.write_text(yaml.safe_dump(values))
    train_model(read_settings(config))
    file = open_token_file(next((config.parent / "second/tokens").iterdir()))
    assert file.header.vocab_size == rows + 1
    largest = int(file.tokens[:].max())
    _check_ids(file, "train.txt", largest + 1)
    with pytest.raises(TrainingError, match=f"'train.txt' must hold tokens below {largest}, "):
        _check_ids(file, "train.txt", largest)


def test_a_changed_token_file_is_not_taken_for_the_first(config: Path) -> None:
    name = _tokenized(config, "train")
    settings = _settings(config, stages=[{"until": 1, "weights": {name: 1}}], valid=[])
    train_model(settings)
    own = config.parent / "train-tokens/tokenizer"
    shutil.copytree(own, config.parent / "own")
    shutil.rmtree(config.parent / "train-tokens")
    write_corpus(config.parent / "train.txt", 7)
    _tokenized(config, "train", config.parent / "own")
    with pytest.raises(TrainingError, match="holds a run with other values of texts"):
        train_model(settings)


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_mmfree.training import optimizer_step, trainer
from mlx_mmfree.training.loop import train_model
from mlx_mmfree.training.settings import read_settings

trainer.plot_run = lambda *_: True
call = optimizer_step.OptimizerStep.__call__

def killed(self, step):
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, step)

optimizer_step.OptimizerStep.__call__ = killed
train_model(read_settings(Path(sys.argv[1])))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_killed_run_goes_on_to_the_same_bits(config: Path, order: str) -> None:
    _settings(config, order=order)
    whole = _settings(config, output="whole")
    train_model(whole)
    settings = _settings(config, output="killed")
    # the last checkpoint is of step 4
    command = [sys.executable, "-c", KILLED, str(config), "5"]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    train_model(settings)
    assert _losses(config, "killed") == _losses(config, "whole")
    want = _best(config, "whole")
    assert all(mx.array_equal(value, want[name]) for name, value in _best(config, "killed").items())

"""A command that refuses its arguments or its data leaves no file or folder that was not there."""

import json
from pathlib import Path

import pytest
import yaml

from mlx_mmfree.cli import main
from mlx_mmfree.errors import TrainingError, TrainingStopped
from mlx_mmfree.files.writing import made_folder, new_file, new_folder
from mlx_mmfree.hub import save_model
from mlx_mmfree.training.run_folder import own_run_folder
from tests.hub.checkpoints import GOLDENS
from tests.training.test_ternarize import dense_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, and data that no command can use."""
    folder = tmp_path_factory.mktemp("refusals")
    save_model(folder / "dense", dense_model(), GOLDENS / "tokenizer_bpe")
    (folder / "short.txt").write_text("hi")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    (folder / "chats.json").write_text(json.dumps([chat]))
    settings = {
        "output": "new/run",
        "model": {"model_type": "hgrn_bit", "vocab_size": 300, "hidden_size": 16},
        "stages": [{"until": 1, "weights": {"short.txt": 1}}],
        "steps": 2,
        "warmup_steps": 1,
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("lora --train --data chats.json", "messages need a chat template"),
        ("train --config train.yaml", "must have more tokens than --sequence-length, 256, but has"),
        ("distil --model dense --to mlgru --data short.txt", "must have more tokens than"),
        ("ternarize --model dense --data short.txt", "must have more tokens than"),
        (
            "calibrate --model dense --data short.txt --group-size 64",
            "[data] 'short.txt' must have more tokens than --length, 2048, but has",
        ),
        ("convert --model dense --to gguf --ternarize", "--gguf-type must fit"),
        ("fuse --model dense --adapter-path none", "--adapter-path must be a folder with"),
        ("tokenize --data none.txt", "--data must be a file"),
    ],
)
def test_nothing_is_left(
    folder: Path,
    command: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    output = [] if "--config" in command else ["--output", "new/run"]
    assert main([*command.split(), *output]) == 2
    assert words in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for run in (tmp_path / "old", tmp_path / "old/new/run"):
        with pytest.raises(TrainingError), own_run_folder(run):
            (run / "tokens").touch()
            raise TrainingError("[train] no")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "tokens"]


@pytest.mark.parametrize("file", ["log.jsonl", "stages/text/log.jsonl", "checkpoint/progress.json"])
def test_what_was_learned_stays(tmp_path: Path, file: str) -> None:
    with pytest.raises(TrainingError), own_run_folder(tmp_path / "run"):
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).touch()
        raise TrainingError("[train] the loss is not finite.")
    assert (tmp_path / "run" / file).exists()


def test_what_was_made_before_an_interrupt_stays(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped), own_run_folder(tmp_path / "run"):
        (tmp_path / "run/tokens").touch()
        raise TrainingStopped("stopped", 2)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "tokens"]


def test_writers_that_fail_leave_no_folder_above(tmp_path: Path) -> None:
    for writer in (new_file, new_folder):
        with pytest.raises(ValueError), writer(tmp_path / "a/b/c"):
            raise ValueError
    with pytest.raises(ValueError), made_folder(tmp_path / "a/b"):
        (tmp_path / "a/file").touch()
        raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


def test_a_folder_is_no_file_of_an_adapter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    flags = ["lora", "--train", "--data", "chats.json", "--resume-adapter-file", "dense"]
    assert main(flags) == 2
    assert "is a folder. Give its adapters.safetensors." in capsys.readouterr().err


def test_a_file_is_no_folder_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with (
        pytest.raises(TrainingError, match=r"output must be a folder but '.*file' is a file"),
        own_run_folder(file),
    ):
        pass
    assert file.read_text() == "mine"

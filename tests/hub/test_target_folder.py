"""A folder is replaced only where nothing but an old checkpoint is lost, and never a source."""

import importlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import convert, load, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.save import check_apart
from mlx_mmfree.training.results import TrainedModel
from tests.hub.checkpoints import GOLDENS, tiny_checkpoint, tiny_model

# the package has a function of the same name
CONVERSION = importlib.import_module("mlx_mmfree.hub.conversion.convert")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "Source")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


class TestSources:
    @pytest.mark.parametrize(
        "target",
        [
            "Source",
            "Source/",
            "./Source/../Source",
            "Source/new/deep",
            "link",
            "link/new",
            "elsewhere/../Source",
            "..",
        ],
    )
    def test_a_source_is_never_a_target(
        self,
        tmp_path: Path,
        source: Path,
        target: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "link").symlink_to("Source")
        monkeypatch.chdir(tmp_path)
        before = contents(tmp_path)
        flags = ["--model", "Source", "--mlx-path", target, "--overwrite"]
        assert main(["convert", *flags]) == 2
        assert "what is read, '" in capsys.readouterr().err
        assert contents(tmp_path) == before

    def test_a_source_that_is_named_through_a_link(self, tmp_path: Path, source: Path) -> None:
        (tmp_path / "link").symlink_to("Source")
        with pytest.raises(CheckpointError, match="must not be or hold what is read"):
            convert(open_checkpoint(tmp_path / "link"), source, overwrite=True)

    def test_letters_of_either_case(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # a disk that tells no cases apart gives one file for both names
        def real(path: Path) -> str:
            return str(path).replace("SOURCE", "Source")

        samefile = os.path.samefile
        monkeypatch.setattr(os.path, "samefile", lambda a, b: samefile(real(a), real(b)))
        monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(real(path)))
        for target in (tmp_path / "SOURCE", tmp_path / "SOURCE" / "new"):
            with pytest.raises(CheckpointError, match="what is read"):
                check_apart(target, [source], "convert")

    def test_a_file_may_lie_beside_its_result(self, tmp_path: Path, source: Path) -> None:
        file = tmp_path / "downloads" / "model.gguf"
        file.parent.mkdir()
        file.touch()
        check_apart(tmp_path / "downloads" / "out", [file], "convert")
        with pytest.raises(CheckpointError, match="must not be or hold"):
            check_apart(tmp_path / "downloads", [file], "convert")

    def test_a_neighbour_with_a_longer_name(self, tmp_path: Path, source: Path) -> None:
        check_apart(tmp_path / "Source2", [source], "convert")
        check_apart(tmp_path / "Source2", [None, tmp_path / "absent"], "convert")

    def test_a_saved_model_and_its_tokenizer(self, tmp_path: Path) -> None:
        folder = tmp_path / "m"
        save_model(folder, tiny_model(vocab_size=700), GOLDENS / "tokenizer_spm")
        before = contents(folder)
        model, tokenizer = load(folder)
        for target in (folder, folder / "new"):
            with pytest.raises(CheckpointError, match="what is read"):
                save_model(target, model, tokenizer, overwrite=True)
        assert contents(folder) == before


def test_files_that_come_during_a_conversion_stay(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m"
    real = CONVERSION.take_stock

    def come(*arguments: Any) -> Any:
        target.mkdir()
        (target / "thesis.txt").write_text("mine")
        return real(*arguments)

    monkeypatch.setattr(CONVERSION, "take_stock", come)
    with pytest.raises(CheckpointError, match="added or changed in the meantime"):
        convert(open_checkpoint(source), target)
    assert contents(target) == {"thesis.txt": b"mine"}
    assert sorted(os.listdir(tmp_path)) == ["Source", "m"]


def test_one_of_two_conversions_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    real = CONVERSION.take_stock

    def wait(*arguments: Any) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        return real(*arguments)

    monkeypatch.setattr(CONVERSION, "take_stock", wait)
    first = threading.Thread(target=convert, args=(open_checkpoint(source), tmp_path / "m"))
    first.start()
    try:
        assert has_begun.wait(60)
        with pytest.raises(CheckpointError, match="another process is writing"):
            convert(open_checkpoint(source), tmp_path / "m")
    finally:
        may_end.set()
        first.join()
    load_again = open_checkpoint(tmp_path / "m")
    assert load_again.tensors
    assert sorted(os.listdir(tmp_path)) == ["Source", "m"]


def test_a_run_that_would_write_into_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "model"
    save_model(folder, tiny_model(vocab_size=700), GOLDENS / "tokenizer_spm")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"text": "The cat sat."}\n' * 4)
    before = contents(tmp_path)
    flags = ["lora", "--train", "--iters", "1", "--data", str(tmp_path / "data")]
    for target in (folder, folder / "adapters", tmp_path / "run"):
        assert main([*flags, "--model", str(folder), "--adapter-path", str(target)]) == 2
        assert "what is read" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_a_run_whose_model_could_not_be_written_at_the_end(tmp_path: Path) -> None:
    notes = tmp_path / "masters" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        TrainedModel(tmp_path, tiny_model(), GOLDENS / "tokenizer_spm", has_validation=True)
    assert notes.read_text() == "mine"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mine.bin", "notes.py", "data.safetensors"])
def test_files_that_no_checkpoint_has_are_kept(tmp_path: Path, source: Path, name: str) -> None:
    target = tmp_path / "m"
    convert(open_checkpoint(source), target)
    convert(open_checkpoint(source), target, overwrite=True)
    (target / name).write_text("mine")
    with pytest.raises(CheckpointError, match=name):
        convert(open_checkpoint(source), target, overwrite=True)
    assert (target / name).read_text() == "mine"


@pytest.mark.parametrize(("name", "is_replaced"), [("README.md", True), ("notes.doc", False)])
def test_what_a_killed_writer_left_of_a_file_is_replaced(
    tmp_path: Path, name: str, is_replaced: bool
) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    stage = folder / f".{name}.{'0' * 16}.mmfree"
    stage.mkdir()
    (stage / "new.md").write_text("half")
    if is_replaced:
        save_model(folder, tiny_model(), overwrite=True)
        assert not stage.exists()
    else:
        with pytest.raises(CheckpointError, match=r"also has '\.notes\.doc\.0+\.mmfree'"):
            save_model(folder, tiny_model(), overwrite=True)

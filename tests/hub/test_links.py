"""A model's folder that links to other files of the user gives none of them away."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.files.checkpoint_files import TOKENIZER_PATTERNS
from mlx_mmfree.hub import convert, load, load_tokenizer, open_checkpoint, save_model
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.hub.publish.upload import plan_upload
from tests.hub.checkpoints import GOLDENS, tiny_model

SECRET = "the user's secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", tiny_model(vocab_size=700), GOLDENS / "tokenizer_spm")
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "model"


def secrets_below(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if file.is_file() and SECRET.encode() in file.read_bytes()
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("pattern", TOKENIZER_PATTERNS)
def test_small_files(folder: Path, tmp_path: Path, pattern: str) -> None:
    name = pattern.replace("[!.]*", "tool_use")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    uses: list[Callable[[], object]] = [
        lambda: convert(open_checkpoint(folder), tmp_path / "out"),
        lambda: save_model(tmp_path / "out", tiny_model(vocab_size=700), folder),
        lambda: plan_upload(folder, "me/tiny"),
    ]
    for use in uses:
        with pytest.raises(MMFreeError, match="outside of its folder"):
            use()
        assert set(secrets_below(tmp_path)) == {folder / name, tmp_path / "secret"}


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "pytorch_model.bin"])
def test_weights(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").rename(tmp_path / "weights")
    (folder / name).symlink_to("../weights")
    with pytest.raises(MMFreeError, match="outside of its folder"):
        open_checkpoint(folder)
    with pytest.raises(MMFreeError, match="outside of its folder"):
        plan_upload(folder, "me/tiny")


def test_a_folder_of_links(folder: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    for use in (load, load_tokenizer):
        with pytest.raises(MMFreeError, match="give the folder that holds it"):
            use(links)


def test_a_link_to_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("model")
    load(tmp_path / "latest")
    plan_upload(tmp_path / "latest", "me/tiny")


def test_a_snapshot_of_the_cache(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--me--tiny"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        shutil.copyfile(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load(snapshot)
    convert(open_checkpoint(snapshot), tmp_path / "out")
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    plan_upload(snapshot, "me/tiny")
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(MMFreeError, match="outside of its folder"):
        convert(open_checkpoint(snapshot), tmp_path / "out2")


def test_adapters(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").symlink_to("../secret")
    with pytest.raises(MMFreeError, match="outside of its folder"):
        read_adapter(adapter)


def test_pipes_do_not_hang(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert main(["generate", "--model", str(folder)]) == 2
        assert "it is a pipe" in capsys.readouterr().err

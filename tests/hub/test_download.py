"""Folders and repositories are told apart; the Hub's answers become clear messages."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HTTPError

from mlx_mmfree.errors import CheckpointError, DownloadError
from mlx_mmfree.hub import download, load_model, load_tokenizer, pack_cache
from mlx_mmfree.hub.download import local_folder
from tests.hub.checkpoints import GOLDENS, golden_checkpoint, tiny_checkpoint
from tests.hub.hub_server import COMMIT, HubServer

TOKENS = mx.array([[1, 7, 3, 39, 0]])


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    folder = tiny_checkpoint(tmp_path / "source")
    for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    for name in (
        "README.md",
        "pytorch_model.bin",
        "optimizer.safetensors",
        "model.fp16.safetensors",
    ):
        (folder / name).write_text("not wanted")
    (folder / "original").mkdir()
    shutil.copyfile(folder / "model.safetensors", folder / "original" / "model.safetensors")
    sharded = golden_checkpoint("hgrn_heads_sharded", tmp_path / "sharded")
    names = ("me/tiny", "me/gated", "me/broken")
    server = HubServer(dict.fromkeys(names, folder) | {"me/sharded": sharded})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 2)
    patched = functools.partial(
        snapshot_download, endpoint=server.url, cache_dir=tmp_path / "cache", token=False
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", patched)
    yield server
    server.close()


def test_downloads_what_a_model_needs(hub: HubServer, tmp_path: Path) -> None:
    model = load_model("me/tiny")
    assert mx.array_equal(model(TOKENS)[0], load_model(tmp_path / "source")(TOKENS)[0])
    wanted = ["config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(set(hub.requested)) == wanted
    hub.requested.clear()
    load_model("me/tiny")
    assert hub.requested == []


def test_downloads_shards(hub: HubServer) -> None:
    assert load_model("me/sharded").vocab_size == 288


def test_a_tokenizer_comes_without_weights(hub: HubServer) -> None:
    assert load_tokenizer("me/tiny").encode("Hello")
    assert "model.safetensors" not in hub.requested


def test_revisions(hub: HubServer) -> None:
    for revision in ("v1", COMMIT, None):
        assert local_folder("me/tiny", revision).name == COMMIT
    with pytest.raises(DownloadError, match="'me/tiny' at revision 'v2' does not exist"):
        load_model("me/tiny", revision="v2")


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("me/absent", "neither a local folder nor a repository of the Hub"),
        ("me/gated", "is gated. Ask for access on https://huggingface.co/me/gated"),
        ("me/broken", "cannot be reached"),
        ("me/two--dashes", "no valid repository id"),
    ],
)
def test_refusals(hub: HubServer, repository: str, message: str) -> None:
    with pytest.raises(DownloadError, match=message) as caught:
        load_model(repository)
    assert "\n" not in str(caught.value)


def test_without_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    want = load_model("me/tiny")(TOKENS)[0]
    local_folder("me/sharded", patterns=download.TOKENIZER_PATTERNS)
    hub.close()
    assert mx.array_equal(load_model("me/tiny")(TOKENS)[0], want)
    assert load_tokenizer("me/tiny").encode("Hello")
    for repository in ("me/sharded", "me/absent"):
        with pytest.raises(DownloadError, match="the Hub cannot be reached"):
            load_model(repository)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert mx.array_equal(load_model("me/tiny")(TOKENS)[0], want)
    with pytest.raises(DownloadError, match="Unset HF_HUB_OFFLINE"):
        load_model("me/absent")


@pytest.mark.parametrize(
    "error", [OSError("No space left on device"), HTTPError("reset\nby peer"), RuntimeError("xet")]
)
def test_interrupted_downloads(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(DownloadError, match="goes on where this one stopped") as caught:
        load_model("me/tiny")
    assert "\n" not in str(caught.value)


def test_packed_form_is_named_for_the_repository(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "packed"))
    want = load_model("me/tiny")(TOKENS)[0]
    [file] = (tmp_path / "packed").iterdir()
    assert file.name.startswith("me--tiny-")
    assert mx.array_equal(load_model("me/tiny")(TOKENS)[0], want)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tiny",
        "./tiny",
        "/absent/tiny",
        "~/absent",
        "~nobody/x",
        "a/b/c",
        "a\\b",
        "me/ti ny",
        "me/",
        "../x",
    ],
)
def test_names_that_are_neither(name: str) -> None:
    with pytest.raises(CheckpointError, match="existing folder or a Hub repository 'owner/name'"):
        load_model(name)


def test_a_path_object_is_never_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="got 'me/tiny', which is neither"):
        load_model(Path("me/tiny"))


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    assert local_folder("me/tiny") == Path("me/tiny")
    assert local_folder("~/me/tiny") == tmp_path / "me" / "tiny"
    with pytest.raises(CheckpointError, match="'revision' must be left out"):
        local_folder("me/tiny", "v1")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        local_folder("file")

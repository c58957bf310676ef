"""Models in a folder of a repository: `owner/name/folder` and `owner/name/folder/file.gguf`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import CheckpointError, MMFreeError
from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.remote.source import hub_path
from tests.hub.checkpoints import GOLDENS, tiny_checkpoint
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import HubServer

Q2 = GOLDENS / "gguf_qwen3_q2_0" / "model.gguf"
Q1 = GOLDENS / "gguf_qwen3_q1_0" / "model.gguf"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with models in folders, and the weights of something else beside each file."""
    top = tmp_path_factory.mktemp("hub") / "cat"
    for name in ("small", "two/deep", "only"):
        (top / name).mkdir(parents=True)
        (top / name / "parameters.pth").write_bytes(b"a pickle")
        (top / name / "config.yaml").write_text("a: 1")
    shutil.copyfile(Q2, top / "small" / "small-q2_0.gguf")
    for name, file in (("one", Q1), ("other", Q2)):
        shutil.copyfile(file, top / "two/deep" / f"{name}.gguf")
    tiny_checkpoint(top / "tiny")
    for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
        shutil.copyfile(file, top / "tiny" / file.name)
    (top / "tiny" / "original").mkdir()
    shutil.copyfile(top / "tiny" / "model.safetensors", top / "tiny/original" / "model.safetensors")
    return top


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[HubServer]:
    with HubServer({"me/cat": source}) as server:
        yield server


@pytest.fixture(scope="module")
def client(hub: HubServer, source: Path) -> Iterator[HubClient]:
    with HubClient(hub.url, source.with_name("home")) as client:
        yield client


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("me/cat/small", Q2),
        ("me/cat/small/small-q2_0.gguf", Q2),
        ("me/cat/two/deep/one.gguf", Q1),
        ("me/cat/two/deep/other.gguf", Q2),
    ],
)
def test_gguf_files_in_folders(client: HubClient, name: str, file: Path) -> None:
    assert client.call("logits", name) == client.call("logits", str(file))


def test_what_the_cache_holds_is_not_all(client: HubClient, source: Path) -> None:
    client.call("logits", "me/cat/two/deep/one.gguf")
    with pytest.raises(MMFreeError, match=r"must hold one .gguf file but holds 2"):
        client.call("logits", "me/cat/two/deep")


def test_folders_in_folders_and_without_a_network(source: Path, tmp_path: Path) -> None:
    (tmp_path / "deep" / "a" / "b" / "c").mkdir(parents=True)
    shutil.copyfile(Q2, tmp_path / "deep" / "a" / "b" / "c" / "m.gguf")
    (tmp_path / "home").mkdir()
    with (
        HubServer({"me/deep": tmp_path / "deep"}) as hub,
        HubClient(hub.url, tmp_path / "home") as client,
        HubClient(hub.url, tmp_path / "home", HF_HUB_OFFLINE="1") as offline,
    ):
        want = client.call("logits", str(Q2))
        for name in ("me/deep/a/b/c", "me/deep/a/b/c/m.gguf"):
            assert client.call("logits", name) == want
        for name in ("me/deep/a/b/c", "me/deep/a/b/c/m.gguf"):
            assert offline.call("logits", name) == want


def test_other_files_are_left_alone(hub: HubServer, client: HubClient, source: Path) -> None:
    earlier = len(hub.downloaded())
    assert client.call("logits", "me/cat/tiny") == client.call("logits", str(source / "tiny"))
    assert client.call("encode", "me/cat/tiny")
    fetched = sorted(hub.downloaded()[earlier:])
    wanted = ["config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"]
    assert fetched == wanted


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("me/cat/two/deep", r"must hold one .gguf file but holds 2: .*me/cat/two/deep/one\.gguf"),
        ("me/cat/small/parameters.pth", r"another kind\. Give 'me/cat/small/small-q2_0\.gguf'"),
        ("me/cat/only/parameters.pth", r"another kind\. Give the folder"),
        ("me/cat/../x", "perhaps with a folder or a .gguf file in it, but got 'me/cat/../x'"),
        ("me/cat//small", "but got 'me/cat//small', which is neither"),
        ("me/cat/small/", "but got 'me/cat/small/', which is neither"),
        ("me/cat/./small", "which is neither"),
        ("me/../cat/small", "which is neither"),
        (
            "me/cat/absent",
            r"'me/cat/absent' must be a folder or a file of the repository.*Give one of the models "
            "within: 'me/cat/small', 'me/cat/tiny', 'me/cat/two/deep'",
        ),
        (
            "me/cat/small/absent.gguf",
            "'me/cat/small/absent.gguf' must be a folder or a file of the",
        ),
        (
            "me/cat",
            "'me/cat' must hold a checkpoint but has no config.json. Give one of the models",
        ),
    ],
)
def test_what_is_refused(client: HubClient, name: str, words: str) -> None:
    with pytest.raises(MMFreeError, match=words):
        client.call("logits", name)


def test_one_file_of_a_folder_is_named_as_makers_name_them(
    hub: HubServer, client: HubClient, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bonsai"
    folder.mkdir()
    for name in ("Bonsai-F16", "Bonsai-PTQ1_0", "Bonsai-mmproj-Q8_0", "Bonsai-PQ2_0"):
        shutil.copyfile(Q2, folder / f"{name}.gguf")
    hub.add("me/bonsai", folder)
    for name in ("me/bonsai", str(folder)):
        with pytest.raises(MMFreeError, match=r"holds 3: .*Give one as '.*/Bonsai-PQ2_0\.gguf'"):
            client.call("logits", name)
    for name in ("F16", "PTQ1_0"):
        (folder / f"Bonsai-{name}.gguf").unlink()
    hub.add("me/bonsai-dev", folder)
    assert client.call("logits", "me/bonsai-dev") == client.call("logits", str(Q2))
    assert client.call("logits", str(folder)) == client.call("logits", str(Q2))


def test_commands_take_folders(client: HubClient) -> None:
    status, out, _ = client.call("command", "show", "model", "--model", "me/cat/small")
    if status == 2:
        status, out, _ = client.call("command", "audit", "--model", "me/cat/small")
    assert status == 0 and out


def test_local_paths_go_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    shutil.copytree(source / "tiny", tmp_path / "me" / "cat" / "small")
    monkeypatch.chdir(tmp_path)
    assert load_model("me/cat/small").config.model_type != "qwen3"
    (tmp_path / "me/cat/small/parameters.pth").write_bytes(b"a pickle")
    shutil.copyfile(Q2, tmp_path / "me/cat/small/q2.gguf")
    with pytest.raises(CheckpointError, match=r"another kind\. Give 'me/cat/small/q2\.gguf'"):
        load_model("me/cat/small/parameters.pth")


def test_a_folder_of_models_names_them(source: Path) -> None:
    with pytest.raises(CheckpointError, match=f"within: '{source}/small', '{source}/tiny'"):
        load_model(source)


def test_a_folder_of_pickles_names_the_gguf(source: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'parameters\.pth' is not read: give the GGUF file"):
        load_model(source / "only")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("me/cat", ("me/cat", ".")),
        ("me/cat/a/b.gguf", ("me/cat", "a/b.gguf")),
        ("me/cat/", None),
        ("cat", None),
        ("me/cat/.hidden", None),
        ("/me/cat", None),
        ("https://me/cat", None),
    ],
)
def test_paths(name: str, path: Any) -> None:
    found = hub_path(name)
    assert found == path if path is None else (found[0], str(found[1])) == path

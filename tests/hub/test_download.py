"""Folders are separated from repositories; the Hub's answers become clear messages."""

import hashlib
import io
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub.errors import HTTPError

from mlx_mmfree import demo
from mlx_mmfree.errors import CheckpointError, DownloadError, MMFreeError
from mlx_mmfree.files import checkpoint_files
from mlx_mmfree.hub import load_model
from mlx_mmfree.hub.checkpoint import pack_cache
from mlx_mmfree.hub.remote.cache_content import Part, RemoteFile
from mlx_mmfree.hub.remote.source import find_source
from tests.files.torch_files import to_torch_checkpoint
from tests.hub.checkpoints import GOLDENS, TOKENS, tiny_checkpoint
from tests.hub.hub_client import HubClient
from tests.hub.hub_server import COMMIT, TOKEN, Answer, HubServer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with files that nobody needs."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("hub") / "source")
    for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    for name in (
        "README.md",
        "pytorch_model.bin",
        "optimizer.safetensors",
        "model.fp16.safetensors",
    ):
        (folder / name).write_text("not wanted")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "notes.txt"):
        (folder / "additional_chat_templates" / name).write_text("with tools")
    (folder / "original").mkdir()
    shutil.copyfile(folder / "model.safetensors", folder / "original" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def hub(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    torch = to_torch_checkpoint(tiny_checkpoint(source.with_name("torch")), shards=2)
    names = ("me/tiny", "me/words", "me/gated", "me/broken", "me/hidden")
    pages = source.with_name("pages")
    pages.mkdir()
    (pages / "README.md").write_text("no model")
    folders = {"me/sharded": GOLDENS / "hgrn_heads_sharded", "me/torch": torch, "me/pages": pages}
    folders["me/unlisted"] = source.with_name("unlisted")
    shutil.copytree(folders["me/sharded"], folders["me/unlisted"])
    (folders["me/unlisted"] / "model.safetensors.index.json").unlink()
    (folders["me/unlisted"] / "._model-00001-of-00002.safetensors").write_bytes(b"\0\5\26\7")
    with HubServer(dict.fromkeys(names, source) | folders) as server:
        yield server


@pytest.fixture(scope="module")
def home(source: Path) -> Path:
    return source.with_name("home")


@pytest.fixture(scope="module")
def client(hub: HubServer, home: Path) -> Iterator[HubClient]:
    """Makes sure that nobody is logged in."""
    with HubClient(hub.url, home) as client:
        yield client


@pytest.fixture(scope="module")
def want(source: Path, client: HubClient) -> Any:
    return client.call("logits", str(source))


def test_downloads_what_a_model_needs(hub: HubServer, client: HubClient, want: Any) -> None:
    assert client.call("logits", "me/tiny") == want
    template = "tool_use.jinja"
    wanted = ["config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"]
    wanted = sorted([*wanted, template])
    assert sorted(hub.downloaded()) == wanted
    assert client.call("logits", "me/tiny") == want
    assert sorted(hub.downloaded()) == wanted


@pytest.mark.parametrize("name", ["me/sharded", "me/unlisted"])
def test_downloads_shards(client: HubClient, name: str) -> None:
    assert len(client.call("logits", name)[0][0]) == 288


def test_torch_files_are_downloaded_where_there_is_nothing_else(
    hub: HubServer, client: HubClient, want: Any
) -> None:
    assert client.call("logits", "me/torch") == want
    assert sum(name.endswith(".bin") for name in hub.downloaded()) == 2


def test_a_tokenizer_comes_without_weights(hub: HubServer, client: HubClient) -> None:
    earlier = len(hub.downloaded())
    assert client.call("encode", "me/words")
    assert "model.safetensors" not in hub.downloaded()[earlier:]


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """A stand-in for large weights, in a repository of its own."""
    content = random.Random(1).randbytes(300_000)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors").write_bytes(content)
    return content


class TestResuming:
    def ranges(self, hub: HubServer, name: str) -> list[str | None]:
        return [
            request.headers.get("Range")
            for request in hub.requests
            if request.method == "GET" and f"{name}/resolve/" in request.path
        ]

    def test_after_the_connection_was_cut(
        self, hub: HubServer, client: HubClient, tmp_path: Path, content: bytes
    ) -> None:
        hub.add("me/cut", tmp_path / "source")
        hub.cuts["model.safetensors"] = 200_000
        folder = Path(client.call("folder", "me/cut"))
        assert (folder / "model.safetensors").read_bytes() == content
        assert self.ranges(hub, "me/cut") == [None, "bytes=200000-"]

    def test_after_a_server_fell_silent(
        self, hub: HubServer, home: Path, tmp_path: Path, content: bytes
    ) -> None:
        hub.add("me/silent", tmp_path / "source")
        hub.stalls["model.safetensors"] = 200_000
        with HubClient(hub.url, home, HF_HUB_DOWNLOAD_TIMEOUT="1") as client:
            folder = Path(client.call("folder", "me/silent"))
        assert (folder / "model.safetensors").read_bytes() == content
        assert self.ranges(hub, "me/silent") == [None, "bytes=200000-"]

    def test_after_a_kill(
        self, hub: HubServer, home: Path, client: HubClient, tmp_path: Path, content: bytes
    ) -> None:
        hub.add("me/killed", tmp_path / "source")
        hub.stalls["model.safetensors"] = 200_000
        blobs = home / "hub" / "models--me--killed" / "blobs"
        with HubClient(hub.url, home) as killed:
            killed.start("folder", "me/killed")
            assert hub.stalled.wait(60)
            until = time.monotonic() + 60
            while sum(file.stat().st_size for file in blobs.glob("*.incomplete")) < 200_000:
                assert time.monotonic() < until
                time.sleep(0.01)
        folder = Path(client.call("folder", "me/killed"))
        assert (folder / "model.safetensors").read_bytes() == content
        assert self.ranges(hub, "me/killed") == [None, "bytes=200000-"]
        assert [file.name for file in blobs.iterdir()] == [hashlib.sha256(content).hexdigest()]

    @pytest.mark.parametrize("size", [1000, 400_000])
    def test_on_a_damaged_prefix(
        self,
        hub: HubServer,
        home: Path,
        client: HubClient,
        tmp_path: Path,
        content: bytes,
        size: int,
    ) -> None:
        name = f"me/damaged{size}"
        hub.add(name, tmp_path / "source")
        blobs = home / "hub" / f"models--{name.replace('/', '--')}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete").write_bytes(bytes(size))
        folder = Path(client.call("folder", name))
        assert (folder / "model.safetensors").read_bytes() == content
        assert self.ranges(hub, name) == (["bytes=1000-", None] if size == 1000 else [None])

    def test_links_in_place_of_a_first_part_are_not_followed(
        self, hub: HubServer, home: Path, client: HubClient, tmp_path: Path, content: bytes
    ) -> None:
        hub.add("me/planted", tmp_path / "source")
        (tmp_path / "mine").write_text("mine")
        blobs = home / "hub" / "models--me--planted" / "blobs"
        blobs.mkdir(parents=True)
        part = blobs / f"{hashlib.sha256(content).hexdigest()}.incomplete"
        part.symlink_to(tmp_path / "mine")
        with pytest.raises(MMFreeError, match="cannot be downloaded"):
            client.call("folder", "me/planted")
        assert (tmp_path / "mine").read_text() == "mine"

    def test_two_processes_share_a_download(
        self, hub: HubServer, home: Path, client: HubClient, tmp_path: Path, content: bytes
    ) -> None:
        hub.add("me/shared", tmp_path / "source")
        with HubClient(hub.url, home) as other:
            other.start("folder", "me/shared")
            folder = Path(client.call("folder", "me/shared"))
            assert Path(other.answer()) == folder
        assert (folder / "model.safetensors").read_bytes() == content
        assert len(self.ranges(hub, "me/shared")) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_content_is_compared_with_the_hash(
    hub: HubServer, home: Path, client: HubClient, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"{}" + bytes(1000))
    repository = f"me/changed-{len(name)}"
    hub.add(repository, tmp_path)
    hub.changed[name] = b"{}" + bytes(999) + b"1"
    try:
        with pytest.raises(MMFreeError, match=rf"'{name}' must have the hash"):
            client.call("folder", repository)
    finally:
        del hub.changed[name]
    assert not any((home / "hub").glob(f"models--{repository.replace('/', '--')}/blobs/*"))
    assert (Path(client.call("folder", repository)) / name).read_bytes() == b"{}" + bytes(1000)


def test_a_busy_hub_is_waited_for(hub: HubServer, client: HubClient, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub.add("me/busy", tmp_path)
    hub.failures += [
        ("me/busy/resolve", Answer(status, {}, {"Retry-After": "0"})) for status in (429, 503)
    ]
    assert (Path(client.call("folder", "me/busy")) / "config.json").read_text() == "{}"
    assert not hub.failures


def test_a_token_that_no_request_carries(hub: HubServer, tmp_path: Path) -> None:
    with (
        HubClient(hub.url, tmp_path / "odd", "hf_\u00e9") as client,
        pytest.raises(MMFreeError, match="plain letters and digits") as caught,
    ):
        client.call("folder", "me/tiny")
    assert "hf_" not in str(caught.value)


def test_revisions(client: HubClient) -> None:
    for revision in ("v1", COMMIT, None):
        assert Path(client.call("folder", "me/tiny", revision)).name == COMMIT
    with pytest.raises(MMFreeError, match="'me/tiny' at revision 'v2' does not exist"):
        client.call("logits", "me/tiny", "v2")


def test_a_dataset_comes_in_the_first_kind_of_its_files(
    hub: HubServer, client: HubClient, tmp_path: Path
) -> None:
    for kind, others in ((".jsonl", ["train.csv"]), (".csv.gz", ["train.parquet"])):
        names = [f"{split}{kind}" for split in ("test", "train", "validation")]
        source, repository = tmp_path / kind, f"me/words{kind.replace('.', '-')}"
        source.mkdir()
        for name in (*names, *others, "README.md", "script.py"):
            (source / name).write_text("{}")
        hub.add(repository, source)
        folder = Path(client.call("dataset", repository))
        assert sorted(file.name for file in folder.iterdir()) == names
        assert hub.asked("GET", f"^datasets/{repository}/resolve/")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/parquet", r"as \.jsonl, \.csv but has none\. Name a split .*: 'me/parquet:train'"),
        ("me/absent", "neither a local folder nor a repository of the Hub"),
        ("me/gated", "Ask for access on https://huggingface.co/datasets/me/gated"),
        ("no folder", "'data' must be an existing file or folder of samples, or a Hub dataset"),
    ],
)
def test_datasets_that_are_refused(
    hub: HubServer, client: HubClient, tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "train.parquet").write_text("columns")
    hub.add("me/parquet", tmp_path)
    with pytest.raises(MMFreeError, match=message):
        client.call("dataset", name)


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("me/absent", "neither a local folder nor a repository of the Hub"),
        (
            "me/absent/small",
            "'me/absent/small' is no local folder or file, and the repository 'me/absent'",
        ),
        (
            "me/absent/s/m.gguf",
            "'me/absent/s/m.gguf' is no local folder or file, and the repository",
        ),
        ("me/absent/parameters.pth", "'me/absent/parameters.pth' is no local folder or file, and"),
        ("me/hidden", "A private repository needs `hf auth login`"),
        ("me/gated", "is gated. Ask for access on https://huggingface.co/me/gated"),
        ("me/broken", "cannot be reached"),
        ("me/two--dashes", "not a valid repository id"),
    ],
)
def test_refusals(client: HubClient, repository: str, message: str) -> None:
    with pytest.raises(MMFreeError, match=message) as caught:
        client.call("logits", repository)
    assert "\n" not in str(caught.value)


def test_a_repository_without_a_model(client: HubClient, home: Path) -> None:
    with pytest.raises(MMFreeError, match="has no config"):
        client.call("logits", "me/pages")
    assert "No files matched" not in (home / "messages.txt").read_text()


def test_with_a_login(hub: HubServer, home: Path, want: Any) -> None:
    home = home.with_name("owner")
    with HubClient(hub.url, home, TOKEN) as client:
        assert client.call("logits", "me/hidden") == want
        with pytest.raises(MMFreeError, match=r"DownloadError: .*is gated"):
            client.call("logits", "me/gated")
        with pytest.raises(MMFreeError, match="neither a local folder nor a repository of the Hub"):
            client.call("logits", "me/absent")
    assert TOKEN not in (home / "messages.txt").read_text()


@pytest.mark.exhaustive
def test_without_network(source: Path, tmp_path: Path, want: Any) -> None:
    folders = {"me/tiny": source, "me/sharded": GOLDENS / "hgrn_heads_sharded"}
    with (
        HubServer(folders) as hub,
        HubClient(hub.url, tmp_path) as client,
        HubClient(hub.url, tmp_path, HF_HUB_OFFLINE="1") as offline,
    ):
        assert client.call("logits", "me/tiny") == want
        client.call("folder", "me/sharded", None, checkpoint_files.TOKENIZER_PATTERNS)
        hub.close()
        assert client.call("logits", "me/tiny") == want
        assert client.call("encode", "me/tiny")
        for repository in ("me/sharded", "me/absent"):
            with pytest.raises(MMFreeError, match="the Hub cannot be reached"):
                client.call("logits", repository)
        for each in (client, offline):
            with pytest.raises(
                MMFreeError, match="'me/absent/x' is no local folder or file, and the"
            ):
                each.call("logits", "me/absent/x")
        assert offline.call("logits", "me/tiny") == want
        with pytest.raises(MMFreeError, match="Unset HF_HUB_OFFLINE"):
            offline.call("logits", "me/absent")


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


class ShortStream(io.BytesIO):
    """Takes a few bytes of what is written, as a raw file may where a disk is nearly full."""

    def write(self, data: Any) -> int:
        return super().write(data[:3])


def test_chunks_are_written_whole(tmp_path: Path) -> None:
    content = bytes(range(10))
    etag = hashlib.sha256(content).hexdigest()
    stream = ShortStream()
    part = Part(RemoteFile("a", "", len(content), etag, tmp_path / etag), stream, int)
    part.write(content)
    assert (stream.getvalue(), part.hash) == (content, etag)


def test_packed_format_is_named_for_the_repository(
    client: HubClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(client.call("folder", "me/tiny"))
    want = load_model(folder)(TOKENS)[0]
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path))
    for _ in range(2):
        assert mx.array_equal(load_model(folder)(TOKENS)[0], want)
    [file] = tmp_path.iterdir()
    assert file.name.startswith("me--tiny-")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tiny",
        "./tiny",
        "/absent/tiny",
        "~/absent",
        "~nobody/x",
        "a/b//c",
        "a\\b",
        "me/ti ny",
        "me/",
        "../x",
    ],
)
def test_names_that_are_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
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
    assert find_source("me/tiny").fetch() == Path("me/tiny")
    assert find_source("~/me/tiny").fetch() == tmp_path / "me" / "tiny"
    with pytest.raises(CheckpointError, match="'revision' must be left out"):
        find_source("me/tiny", "v1").fetch()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        find_source("file").fetch()


@pytest.mark.exhaustive
def test_the_model_in_the_package_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_source("demo").fetch() == demo.path()
    (tmp_path / "demo").mkdir()
    assert find_source("demo").fetch() == Path("demo")

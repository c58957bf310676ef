"""Only regular files are opened, and of a model's folder only what lies in it."""

import codecs
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import MMFreeError
from mlx_mmfree.files.reading import (
    check_link,
    open_file,
    read_file,
    read_text,
)
from mlx_mmfree.hub import load_model, load_tokenizer
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.images.picture_file import read_picture
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.image_sets import array_pictures, idx_pictures

REPOSITORY = "models--me--tiny"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("secret")
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


class TestKinds:
    def test_pipes_do_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("pipe")
        for name in ("pipe", "link"):
            with pytest.raises(OSError, match="it is a pipe, not a regular file"):
                open_file(tmp_path / name)

    def test_a_file_that_becomes_a_pipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a").touch()
        status = os.stat(tmp_path / "a")
        (tmp_path / "a").unlink()
        os.mkfifo(tmp_path / "a")
        monkeypatch.setattr(os, "stat", lambda _: status)
        with pytest.raises(OSError, match="it is a pipe"):
            open_file(tmp_path / "a")

    def test_other_kinds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            for name, kind in (
                (".", "a folder"),
                ("socket", "a socket"),
                ("/dev/zero", "a device"),
            ):
                with pytest.raises(OSError, match=f"it is {kind}"):
                    open_file(Path(name))
        with pytest.raises(FileNotFoundError):
            open_file(Path("absent"))

    def test_sizes(self, secret: Path) -> None:
        assert read_file(secret, 6) == read_file(secret, 6, is_member=True) == b"secret"
        for is_member in (False, True):
            with pytest.raises(OSError, match="it has 6 bytes, more than the 5"):
                read_file(secret, 5, is_member=is_member)


class TestLinks:
    def test_out_of_the_folder(self, folder: Path, secret: Path) -> None:
        link = folder / "chat_template.jinja"
        for target in (secret, "../secret", "../model/../secret"):
            link.symlink_to(target)
            with pytest.raises(OSError, match=r"is a link to '.*secret', outside of its folder"):
                open_file(link, is_member=True)
            with open_file(link) as stream:
                assert stream.read() == b"secret"
            link.unlink()

    def test_over_another_link(self, folder: Path, secret: Path) -> None:
        (folder / "hop").symlink_to("..")
        (folder / "a").symlink_to("hop/secret")
        with pytest.raises(OSError, match="outside of its folder"):
            open_file(folder / "a", is_member=True)
        (folder / "a").unlink()
        # beside it a folder whose name begins like the model's
        (folder.parent / "model2").mkdir()
        (folder.parent / "model2" / "a").touch()
        (folder / "a").symlink_to("../model2/a")
        with pytest.raises(OSError, match="outside of its folder"):
            open_file(folder / "a", is_member=True)

    def test_in_the_folder(self, folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text("b")
        (folder / "a").symlink_to("sub/b")
        assert read_file(folder / "a", 9, is_member=True) == b"b"
        # the folder itself may be a link
        (folder.parent / "latest").symlink_to("model")
        assert read_file(folder.parent / "latest" / "a", 9, is_member=True) == b"b"

    def test_loops(self, folder: Path) -> None:
        (folder / "a").symlink_to("b")
        (folder / "b").symlink_to("a")
        with pytest.raises(OSError):
            open_file(folder / "a", is_member=True)


class TestSnapshots:
    @pytest.fixture
    def snapshot(self, tmp_path: Path) -> Path:
        repository = tmp_path / "hub" / REPOSITORY
        (repository / "blobs").mkdir(parents=True)
        (repository / "blobs" / "1f").write_text("content")
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        return snapshot

    def test_links_to_content(self, snapshot: Path) -> None:
        (snapshot / "a").symlink_to("../../blobs/1f")
        assert read_file(snapshot / "a", 9, is_member=True) == b"content"

    def test_links_to_shared_content(self, snapshot: Path) -> None:
        shared = snapshot.parents[2] / "blobs" / "0a" / ("0a" * 32)
        shared.parent.mkdir(parents=True)
        shared.write_text("shared")
        (snapshot.parents[1] / "blobs" / "2f").symlink_to(f"../../blobs/0a/{'0a' * 32}")
        (snapshot / "a").symlink_to("../../blobs/2f")
        assert read_file(snapshot / "a", 9, is_member=True) == b"shared"

    @pytest.mark.parametrize(
        "target", ["../../refs", "../../../models--me--other/blobs/1f", "../../../token"]
    )
    def test_links_elsewhere(self, snapshot: Path, target: str) -> None:
        (snapshot / "a").symlink_to(target)
        with pytest.raises(OSError, match="outside of its folder"):
            check_link(snapshot / "a")

    def test_content_that_is_a_link_itself(self, snapshot: Path, secret: Path) -> None:
        (snapshot.parents[1] / "blobs" / "2f").symlink_to(secret)
        (snapshot / "a").symlink_to("../../blobs/2f")
        with pytest.raises(OSError, match="outside of its folder"):
            check_link(snapshot / "a")

    def test_a_folder_of_contents_that_is_a_link(self, snapshot: Path, tmp_path: Path) -> None:
        blobs = snapshot.parents[1] / "blobs"
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "key").write_text("secret")
        blobs.rename(blobs.with_name("other"))
        blobs.symlink_to(tmp_path / "home")
        (snapshot / "a").symlink_to("../../blobs/key")
        with pytest.raises(OSError, match="outside of its folder"):
            check_link(snapshot / "a")

    def test_a_folder_that_only_has_the_name(self, tmp_path: Path) -> None:
        folder = tmp_path / "snapshots" / "model"
        folder.mkdir(parents=True)
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "key").write_text("secret")
        (folder / "a").symlink_to("../../blobs/key")
        with pytest.raises(OSError, match="outside of its folder"):
            check_link(folder / "a")


class TestTexts:
    @pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
    def test_a_byte_order_mark_is_no_part_of_a_text(self, mark: bytes, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(mark + "Größe\ufeff".encode())
        assert read_text(tmp_path / "a", 20) == "Größe\ufeff"

    @pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be"])
    def test_utf16_is_named(self, code: str, tmp_path: Path) -> None:
        text = "a" if code == "utf-16" else "\ufeffa"
        (tmp_path / "a").write_bytes(text.encode(code))
        with pytest.raises(OSError, match="it must be UTF-8 but is UTF-16"):
            read_text(tmp_path / "a", 20)

    def test_other_bytes_are_placed(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"ab\xff")
        with pytest.raises(OSError, match="it must be UTF-8 but is not at byte 2"):
            read_text(tmp_path / "a", 20)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 493443\n" % (b"0f" * 32)
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda file: load_model(file.parent),
    "model.safetensors": lambda file: load_model(file.parent),
    "model.safetensors.index.json": lambda file: load_model(file.parent),
    "model-00001-of-00001.safetensors": lambda file: load_model(file.parent),
    "pytorch_model.bin": lambda file: load_model(file.parent),
    "m.gguf": load_model,
    "tokenizer.json": lambda file: load_tokenizer(file.parent),
    "tokenizer.model": lambda file: load_tokenizer(file.parent),
    "adapter_config.json": lambda file: read_adapter(file.parent),
    "adapters.safetensors": lambda file: read_adapter(file.parent),
    "a.txt": lambda file: list(read_documents(file)),
    "a.jsonl": lambda file: list(read_documents(file)),
    "a.npz": array_pictures,
    "a.idx": idx_pictures,
    "a.png": read_picture,
}


@pytest.mark.parametrize("name", [*READERS, pytest.param("a.parquet", marks=pytest.mark.parquet)])
def test_pointers_of_git_lfs_are_named(folder: Path, name: str) -> None:
    """A clone without Git LFS has them in place of large files."""
    if name != "config.json":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "adapter_config.json").write_text('{"lora_parameters": {"scale": 1.0}}')
    (folder / name).write_bytes(POINTER)
    read = READERS.get(name, lambda file: list(read_documents(file)))
    with pytest.raises(
        MMFreeError, match=f"{name}.* a pointer of Git LFS .* run 'git lfs pull'"
    ) as e:
        read(folder / name)
    assert "damaged" not in str(e.value)
    assert "\n" not in str(e.value)

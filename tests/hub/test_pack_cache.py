"""The packed format of float checkpoints is kept and used only while it is right."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.hub import load_model, save_model
from mlx_mmfree.hub.checkpoint import pack_cache
from tests.hub.checkpoints import edit_json, logits, tiny_checkpoint, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize("dtype", [None, mx.float32, mx.bfloat16], ids=str)
def test_second_load_is_the_same(
    tmp_path: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    dtype: mx.Dtype | None,
) -> None:
    source = tiny_model(**options)
    source.set_dtype(mx.float16)
    save_model(tmp_path / "model", source)
    first = load_model(tmp_path / "model", dtype=dtype)
    [file] = cache.glob("*.safetensors")
    notice = capsys.readouterr().err
    assert notice.count("\n") == 1
    assert str(file) in notice
    assert "MLX_MMFREE_CACHE=0" in notice
    written = file.stat().st_mtime_ns
    second = load_model(tmp_path / "model", dtype=dtype)
    assert mx.array_equal(logits(second), logits(first))
    assert second.dtype == first.dtype
    assert capsys.readouterr().err == ""
    assert [file] == list(cache.glob("*.safetensors"))
    assert file.stat().st_mtime_ns == written


def test_reads_the_cache_and_not_the_source(folder: Path, cache: Path) -> None:
    want = logits(load_model(folder))
    weights = folder / "model.safetensors"
    status = weights.stat()
    # the same size and time, other values: only the cache can give the old logits
    content = weights.read_bytes()
    weights.write_bytes(content[:-4096] + bytes(4096))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert mx.array_equal(logits(load_model(folder)), want)
    touch(weights)
    assert not mx.array_equal(logits(load_model(folder)), want)


@pytest.mark.parametrize("change", ["time", "size", "config", "target of a link", "rounding"])
def test_another_source_is_packed_again(
    tmp_path: Path,
    folder: Path,
    cache: Path,
    change: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model(folder)
    weights = folder / "model.safetensors"
    if change == "time":
        touch(weights)
    elif change == "size":
        save_model(folder, tiny_model(vocab_size=42), overwrite=True)
    elif change == "config":
        edit_json(folder / "config.json", rms_norm_eps=0.5)
    elif change == "rounding":
        monkeypatch.setattr(pack_cache, "ROUNDING_VERSION", pack_cache.ROUNDING_VERSION + 1)
    else:
        status = weights.stat()
        shutil.copy2(weights, folder / "blob")
        weights.unlink()
        weights.symlink_to("blob")
        assert weights.stat().st_mtime_ns == status.st_mtime_ns
    capsys.readouterr()
    model = load_model(folder)
    assert "is kept in" in capsys.readouterr().err
    assert len(list(cache.glob("*.safetensors"))) == 1
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    assert mx.array_equal(logits(model), logits(load_model(folder)))


def damages(content: bytes) -> dict[str, bytes]:
    middle = len(content) * 3 // 4
    return {
        "empty": b"",
        "cut": content[:-5],
        "header": content[:20] + b"#" + content[21:],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "checksums": content.replace(b"mmfree_sha256", b"mmfree_sha255"),
        "other file": b"\2\0\0\0\0\0\0\0{}",
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("damage", damages(b"x" * 100))
def test_damaged_entries_are_made_again(
    folder: Path, cache: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    want = logits(load_model(folder))
    [file] = cache.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(damages(content)[damage])
    capsys.readouterr()
    assert mx.array_equal(logits(load_model(folder)), want)
    assert "is kept in" in capsys.readouterr().err
    assert file.read_bytes() == content
    load_model(folder)
    assert capsys.readouterr().err == ""


def test_off_small_float_and_packed_leave_nothing(
    tmp_path: Path, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(folder, packed=False)
    save_model(tmp_path / "dense", tiny_model(linear_class="dense"))
    load_model(tmp_path / "dense")
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 10**6)
    load_model(folder)
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")
    save_model(tmp_path / "packed", load_model(folder))
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(cache))
    load_model(tmp_path / "packed")
    assert not cache.exists()


def test_lies_beside_the_hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLX_MMFREE_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert pack_cache.cache_folder() == tmp_path / "mlx_mmfree"
    assert pack_cache.MIN_SOURCE_BYTES == 64_000_000


@pytest.mark.parametrize("problem", ["disk is full", "folder is a file", "no permission"])
def test_goes_on_where_nothing_can_be_kept(
    folder: Path,
    cache: Path,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if problem == "disk is full":
        usage = shutil.disk_usage(folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    elif problem == "folder is a file":
        cache.touch()
    else:

        def refuse(*_: Any) -> None:
            raise PermissionError("denied")

        monkeypatch.setattr(os, "replace", refuse)
    model = load_model(folder)
    assert capsys.readouterr().err.startswith("[load] the packed format is not kept in")
    assert not cache.is_dir() or not any(cache.iterdir())
    assert logits(model).shape == (1, 5, 40)


def test_many_at_once(folder: Path, cache: Path) -> None:
    def loads() -> None:
        for _ in range(5):
            shutil.rmtree(cache, ignore_errors=True)
            # MLX arrays belong to the thread that made them
            results.append(
                bool(mx.array_equal(logits(load_model(folder)), logits(load_model(folder))))
            )

    results: list[bool] = []
    threads = [threading.Thread(target=loads) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 15
    assert all(not entry.name.startswith(".") for entry in cache.iterdir())

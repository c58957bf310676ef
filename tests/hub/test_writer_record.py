"""Folders say which version wrote them; ternary weights of unknown make are named at load."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import convert, load_model, save_model
from mlx_mmfree.hub.checkpoint import checkpoint
from mlx_mmfree.hub.checkpoint.checkpoint import open_checkpoint
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.ops.ternary import ROUNDING_VERSION
from mlx_mmfree.version import __version__
from tests.hub.checkpoints import (
    edit_json,
    tiny_transformer,
    write_bitnet_checkpoint,
)

WARNING = "may hold wrong ternary weights"


@pytest.fixture(autouse=True)
def every_matrix_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_SOUND_WEIGHTS", 0)


@pytest.fixture
def masters(tmp_path: Path) -> Path:
    save_model(tmp_path / "masters", tiny_transformer())
    return tmp_path / "masters"


def without_record(folder: Path) -> Path:
    """The folder as an older version wrote it."""
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("mlx_mmfree")["version"] == __version__
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rounding(path: Path) -> object:
    return checkpoint.rounding_of(open_checkpoint(path))


def warned(path: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    load_model(path)
    lines = [line for line in capsys.readouterr().err.splitlines() if WARNING in line]
    assert len(lines) <= 1
    return bool(lines)


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_converted_folders_have_a_record(
    masters: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(open_checkpoint(masters), tmp_path / "new", to=to)
    assert rounding(tmp_path / "new") == ROUNDING_VERSION
    assert not warned(tmp_path / "new", capsys)
    without_record(tmp_path / "new")
    assert rounding(tmp_path / "new") is None
    assert warned(tmp_path / "new", capsys)


def test_saved_models_have_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "packed", pack_linears(tiny_transformer()))
    assert not warned(tmp_path / "packed", capsys)
    assert warned(without_record(tmp_path / "packed"), capsys)


@pytest.mark.parametrize("copy", ["save", "mlx", "hf"])
def test_a_doubt_is_handed_on(
    masters: Path, tmp_path: Path, copy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(open_checkpoint(masters), tmp_path / "old")
    without_record(tmp_path / "old")
    capsys.readouterr()
    if copy == "save":
        save_model(tmp_path / "copy", load_model(tmp_path / "old"))
    else:
        convert(open_checkpoint(tmp_path / "old"), tmp_path / "copy", to=copy)
    assert WARNING in capsys.readouterr().err
    assert warned(tmp_path / "copy", capsys)


@pytest.mark.parametrize("linear_class", [None, "autobitlinear"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_published_packed_folders_are_not_doubted(
    tmp_path: Path, linear_class: str | None, dtype: mx.Dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_transformer()
    without_record(write_bitnet_checkpoint(tmp_path / "model", model, linear_class))
    file = tmp_path / "model" / "model.safetensors"
    tensors = {
        name: array.astype(dtype) if array.dtype != mx.uint8 else array
        for name, array in mx.load(str(file)).items()
    }
    # only files of 32-bit scales need another writer's mark
    mx.save_safetensors(str(file), tensors, {"format": "pt" if dtype == mx.float32 else "mlx"})
    assert rounding(tmp_path / "model") == "source"
    assert not warned(tmp_path / "model", capsys)
    convert(open_checkpoint(tmp_path / "model"), tmp_path / "new")
    assert rounding(tmp_path / "new") == "source"
    if dtype != mx.float32:
        assert not warned(without_record(tmp_path / "new"), capsys)


def test_masters_and_dense_folders_are_not_doubted(
    masters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not warned(without_record(masters), capsys)
    save_model(tmp_path / "dense", tiny_transformer(linears=None))
    assert not warned(without_record(tmp_path / "dense"), capsys)


@pytest.mark.parametrize(
    "record", [None, [], {}, {"rounding": "x"}, {"rounding": True}, {"rounding": 1}]
)
def test_a_damaged_or_old_record_is_a_doubt(
    tmp_path: Path, record: object, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "packed", pack_linears(tiny_transformer()))
    edit_json(tmp_path / "packed" / "config.json", mlx_mmfree=record)
    assert warned(tmp_path / "packed", capsys)


def test_small_matrices_are_not_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_SOUND_WEIGHTS", 2**20)
    save_model(tmp_path / "packed", pack_linears(tiny_transformer()))
    assert not warned(without_record(tmp_path / "packed"), capsys)


def test_a_newer_version_is_not_doubted(
    masters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(open_checkpoint(masters), tmp_path / "new")
    edit_json(tmp_path / "new/config.json", mlx_mmfree={"rounding": ROUNDING_VERSION + 1})
    assert not warned(tmp_path / "new", capsys)

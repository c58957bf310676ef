"""Folders and GGUF files say which version wrote them."""

import json
from pathlib import Path

import pytest

from mlx_mmfree.hub import convert, save_model
from mlx_mmfree.hub.checkpoint.checkpoint import open_checkpoint
from mlx_mmfree.version import __version__
from tests.hub.checkpoints import tiny_transformer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tmp_path / "saved", tiny_transformer())
    return tmp_path / "saved"


def record(folder: Path) -> object:
    return json.loads((folder / "config.json").read_text())["mlx_mmfree"]


def test_saved_models_have_a_record(saved: Path) -> None:
    assert record(saved) == {"version": __version__}


@pytest.mark.parametrize("to", ["mlx", "hf"])
def test_converted_folders_have_a_record(saved: Path, tmp_path: Path, to: str) -> None:
    convert(open_checkpoint(saved), tmp_path / "new", to=to)
    assert record(tmp_path / "new") == {"version": __version__}

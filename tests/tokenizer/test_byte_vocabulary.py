"""Models that read bytes, and have no files of a tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.hub import load, save_model
from mlx_mmfree.models import find
from mlx_mmfree.tokenizer.documents import tokenizer_digest
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.hub.checkpoints import GOLDENS

ENWIK8 = {"model_type": "reformer", "vocab_size": 258}


def folder_with(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_ids_are_bytes_after_two_others(tmp_path: Path) -> None:
    """The ids follow the card of `google/reformer-enwik8`: `[byte + 2 for byte in text]`."""
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, ENWIK8))
    text = "In 1965, Brooks — ü 𝛑\n\0"
    ids = tokenizer.encode(text)
    assert ids == [byte + 2 for byte in text.encode()]
    assert tokenizer.decode([0, *ids, 1]) == text
    assert tokenizer.vocab_size == 258 and tokenizer.encode("") == []
    assert tokenizer.decode([0xC3 + 2]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.id_to_piece(67) == "<0x41>" and tokenizer.id_to_piece(1) == "<1>"
    with pytest.raises(ValueError, match="below 258"):
        tokenizer.decode([258])
    assert len(tokenizer_digest(tokenizer)) == 64


@pytest.mark.parametrize(
    "config", [{}, ENWIK8 | {"vocab_size": 320}, ENWIK8 | {"model_type": ["reformer"]}], ids=str
)
def test_other_models_need_files(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"must hold 'tokenizer.json'"):
        Tokenizer.from_folder(folder_with(tmp_path, config))


def test_a_vocabulary_file_is_preferred(tmp_path: Path) -> None:
    """Reformer's own has another name."""
    folder_with(tmp_path, ENWIK8)
    spm = GOLDENS / "tokenizer_spm"
    shutil.copyfile(spm / "tokenizer.model", tmp_path / "spiece.model")
    want = Tokenizer.from_folder(spm).encode("A small dog", False)
    assert Tokenizer.from_folder(tmp_path).encode("A small dog", False) == want


def test_it_generates_and_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    architecture = find("reformer")
    mx.random.seed(0)
    keys = {"vocab_size": 258, "initializer_range": 0.3}
    model = architecture.build(architecture.config.from_hub({**architecture.tiny, **keys}))
    save_model(tmp_path / "m", model)
    target = ["--mlx-path", str(tmp_path / "converted")]
    assert main(["convert", "--model", str(tmp_path / "m"), *target]) == 0
    capsys.readouterr()
    flags = ["-p", "ü", "-m", "12", "--temp", "0"]
    assert main(["generate", "--model", str(tmp_path / "converted"), *flags]) == 0
    assert "12 tokens" in capsys.readouterr().err
    assert load(tmp_path / "converted")[1].encode("A") == [67]

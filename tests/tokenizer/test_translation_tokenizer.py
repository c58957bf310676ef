"""Tokenizers of two languages."""

import json
from pathlib import Path

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.tokenizer.translation_tokenizer import TranslationTokenizer
from tests.hub.marian_folder import marian_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marian_folder(tmp_path_factory.mktemp("marian") / "model")


def test_one_text_to_tokens_and_tokens_to_the_other(folder: Path) -> None:
    tokenizer = TranslationTokenizer(folder)
    listed = json.loads((folder / "vocab.json").read_text())
    assert tokenizer.vocab_size == len(listed)
    ids = tokenizer.encode("the cat")
    assert ids[-1] == tokenizer.eos_token_id == 0
    assert tokenizer.decode(ids) == "the cat"
    coded = tokenizer.encode(">>fra<<the cat")
    assert coded == [listed[">>fra<<"], *ids]
    assert tokenizer.encode("Ω")[-2] == listed["<unk>"]
    padded = [tokenizer.pad_token_id, *ids, tokenizer.pad_token_id]
    assert tokenizer.decode(padded) == "the cat"
    with pytest.raises(ValueError, match="but got 4000"):
        tokenizer.decode([4000])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "[]", "must be an object"),
        ("vocab.json", '{"</s>": 0, "<unk>": 1}', "must list <pad> but does not"),
        (
            "vocab.json",
            '{"</s>": 0, "<unk>": 1, "<pad>": -1}',
            "must give each token a whole number",
        ),
        ("vocab.json", '{"</s>": 0, "<unk>": true}', "must give each token a whole number"),
        ("source.spm", "no model", "not a SentencePiece model"),
        ("target.spm", None, "cannot be read"),
    ],
)
def test_damaged_files_are_refused(
    folder: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    for file in ("source.spm", "target.spm", "vocab.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        TranslationTokenizer(tmp_path)

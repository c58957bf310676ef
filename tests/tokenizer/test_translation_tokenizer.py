"""Tokenizers of two languages."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.generation.translation import translate
from mlx_mmfree.hub import load_model
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


def test_a_text_beyond_the_longest_is_not_encoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cast(Any, load_model(folder))
    tokenizer = TranslationTokenizer(folder)
    for text in (
        "the cat",
        ">>fra<< the cat sat on a mat",
        ">>" + "a" * 900 + "<<the cat",
        "\u2603" * 99,
    ):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    encode = tokenizer.encode
    monkeypatch.setattr(TranslationTokenizer, "encode", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(ValueError, match=r"at most 24 tokens.*but got at least [0-9]{3}"):
        translate(model, tokenizer, ["the cat sat on a mat " * 100])
    assert len(encode("\u2603" * 10_000)) < 24


def test_an_unknown_token_keeps_the_words_around_it_apart(folder: Path) -> None:
    """The words are separated as in transformers 5.24.0 with `skip_special_tokens`."""
    tokenizer = TranslationTokenizer(folder)
    the, cat = (tokenizer.encode(word)[:-1] for word in ("the", "cat"))
    unknown = json.loads((folder / "vocab.json").read_text())["<unk>"]
    assert tokenizer.decode([*the, unknown, *cat, 0]) == "the cat"
    assert tokenizer.decode([unknown, *the, unknown, unknown, *cat, unknown]) == "the cat"


def test_special_tokens_have_the_names_of_the_config(folder: Path, tmp_path: Path) -> None:
    for file in ("source.spm", "target.spm"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    listed = json.loads((folder / "vocab.json").read_text())
    renamed = {"</s>": "<end>", "<unk>": "<odd>", "<pad>": "<gap>"}
    vocabulary = {renamed.get(piece, piece): number for piece, number in listed.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    names = {"eos_token": "<end>", "unk_token": {"content": "<odd>"}, "pad_token": "<gap>"}
    config = {**names, "additional_special_tokens": [">>fra<<"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = TranslationTokenizer(tmp_path)
    ids = tokenizer.encode(">>fra<<the cat")
    assert ids == TranslationTokenizer(folder).encode(">>fra<<the cat")
    assert tokenizer.decode(ids) == "the cat"


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

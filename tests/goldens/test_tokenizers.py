"""Tokenizers against the reference libraries: ids, pieces, texts and chats."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.hub import Tokenizer, load_tokenizer

Golden = dict[str, Any]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def reference(tokenizer_folder: Path) -> Golden:
    return json.loads((tokenizer_folder / "tokenizer_golden.json").read_text())


def test_ids(tokenizer: Tokenizer, reference: Golden) -> None:
    assert tokenizer.vocab_size == reference["vocab_size"]
    for item in reference["items"]:
        text = item["text"]
        # `ids` holds the framing tokens only where a plain format is given beside it
        plain = item.get("ids_no_special", item["ids"])
        framed = item["ids"] if "ids_no_special" in item else [tokenizer.bos_token_id, *plain]
        assert tokenizer.encode(text, add_special_tokens=False) == plain, text
        assert tokenizer.encode(text) == framed, text


def test_pieces_and_texts(tokenizer: Tokenizer, reference: Golden) -> None:
    for item in reference["items"]:
        ids = item["ids"]
        assert tokenizer.decode(ids) == item["decoded"], item["text"]
        if "pieces" in item:
            assert [tokenizer.id_to_piece(number) for number in ids] == item["pieces"]
        if "decoded_skip_special" in item:
            skipped = tokenizer.decode(ids, skip_special_tokens=True)
            assert skipped == item["decoded_skip_special"]


def test_special_tokens_in_the_text(tokenizer: Tokenizer, reference: Golden) -> None:
    """Special tokens in a text are found, as some libraries do whatever the file says."""
    for item in reference["items"]:
        if "hf_ids" not in item:
            continue
        assert tokenizer.decode(item["hf_ids"]) == item["hf_decoded"]
        skipped = tokenizer.decode(item["hf_ids"], skip_special_tokens=True)
        assert skipped == item["hf_decoded_skip_special"]
        # that library drops a blank at the start of a text
        if not item["text"].startswith((" ", "\N{LOWER ONE EIGHTH BLOCK}")):
            assert tokenizer.encode(item["text"], parse_special=True) == item["hf_ids"]


def test_streamed_text(tokenizer: Tokenizer, reference: Golden) -> None:
    for item in reference["items"]:
        detokenizer = tokenizer.detokenizer()
        parts = [detokenizer.add(number) for number in item["ids"]]
        assert "".join(parts) + detokenizer.finalize() == item["decoded"]


def test_chats(tokenizer: Tokenizer, reference: Golden) -> None:
    assert reference["chat"]
    for chat in reference["chat"]:
        arguments = chat["messages"], chat["add_generation_prompt"]
        assert tokenizer.apply_chat_template(*arguments, tokenize=False) == chat["text"]
        assert tokenizer.apply_chat_template(*arguments) == chat["ids"]

"""Streamed text equals decoded text and never changes once given out."""

import json
import random
import time
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as LibraryTokenizer

from mlx_mmfree.tokenizer.tokenizer import Tokenizer

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
NAMES = ["tokenizer_spm", "tokenizer_bpe"]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDENS / request.param


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = False) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*map(detokenizer.add, ids), detokenizer.finalize()]


def test_goldens(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    golden = json.loads((folder / "tokenizer_golden.json").read_text())
    for item in golden["items"]:
        chunks = stream(tokenizer, item["ids"])
        assert "".join(chunks) == item["decoded"]
        assert not any("\N{REPLACEMENT CHARACTER}" in chunk for chunk in chunks)
    for item in golden["chat"]:
        assert "".join(stream(tokenizer, item["ids"])) == tokenizer.decode(item["ids"])


def test_characters_come_whole(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("\U0001f469\u200d\U0001f467 \u65e5", add_special_tokens=False)
    chunks = [chunk for chunk in stream(tokenizer, ids) if chunk.strip()]
    assert chunks == ["\U0001f469", "\u200d", "\U0001f467", "\u65e5"]


@pytest.mark.parametrize("skip", [False, True])
def test_random_ids_equal_decode(folder: Path, skip: bool) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(60))]
        assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("skip", [False, True])
def test_byte_level_decode_equals_library(skip: bool) -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")
    library = LibraryTokenizer.from_file(str(GOLDENS / "tokenizer_bpe" / "tokenizer.json"))
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(518) for _ in range(rng.randrange(60))]
        assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_decode_equals_library() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_spm")
    library = SentencePieceProcessor()
    model = (GOLDENS / "tokenizer_spm" / "tokenizer.model").read_bytes()
    library.LoadFromSerializedProto(model)
    rng = random.Random(2)
    for _ in range(300):
        highest = rng.choice((259, 640))
        ids = [rng.randrange(3, highest) for _ in range(rng.randrange(60))]
        assert tokenizer.decode(ids) == library.decode(ids)


def test_finalize_starts_anew(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("one two", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    texts = ["".join(map(detokenizer.add, ids)) + detokenizer.finalize() for _ in range(2)]
    assert texts == ["one two", "one two"]


def test_unfinished_character_is_replaced_at_the_end() -> None:
    tokenizer = Tokenizer.from_folder(GOLDENS / "tokenizer_spm")
    assert stream(tokenizer, [243, 162, 155]) == ["", "", "", "\N{REPLACEMENT CHARACTER}" * 3]


def test_time_is_linear(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("The quick brown fox \U0001f600 " * 200, add_special_tokens=False)

    def seconds(repeats: int) -> float:
        started = time.process_time()
        stream(tokenizer, ids * repeats)
        return time.process_time() - started

    short = min(seconds(1) for _ in range(3))
    assert seconds(20) < 100 * short


def test_ids_outside_the_vocabulary(folder: Path) -> None:
    detokenizer = Tokenizer.from_folder(folder).detokenizer()
    for token_id in (-1, 10_000, 2**40):
        with pytest.raises(ValueError, match=rf"but got {token_id}\."):
            detokenizer.add(token_id)

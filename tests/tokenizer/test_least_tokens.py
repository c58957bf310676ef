"""How many tokens a text has at least: never more than it has, and often enough to refuse it early."""

import random
import sys
import time
import unicodedata
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer

from mlx_mmfree import demo
from mlx_mmfree.tokenizer.sentencepiece_model import LeastPieces, load_processor
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.tokenizer.tokenizer_json import BYTE_CHARACTERS
from tests.tokenizer.test_hostile_tokenizers import (
    BLANK,
    BPE,
    PUBLISHED,
    SPM,
    byte_level,
    charsmap,
    document,
    load,
    replace,
    sequence,
    split,
    unigram,
)
from tests.tokenizer.test_tokenizer import llama_style

_MODEL = document()["model"]
# of the bytes of one letter with three accents, which the normalizer composes of four characters
_CHARACTERS = {byte: character for character, byte in BYTE_CHARACTERS.items()}
_BYTES = [_CHARACTERS[byte] for byte in "\u1f82".encode()]
_TOKENS = [*BYTE_CHARACTERS, "".join(_BYTES[:2]), "".join(_BYTES)]
_ONE_LETTER = {
    "type": "BPE",
    "vocab": {piece: number for number, piece in enumerate(_TOKENS)},
    "merges": [_BYTES[:2], ["".join(_BYTES[:2]), _BYTES[2]]],
}
KNOWN: dict[str, dict[str, Any]] = {
    **{name: parts for name, parts in PUBLISHED.items() if name in ("GPT-2", "Qwen", "Falcon")},
    "composed": {
        "normalizer": {"type": "NFKC"},
        "model": _ONE_LETTER,
        "added_tokens": [],
        "post_processor": None,
    },
    "decomposed": {"normalizer": {"type": "NFKD"}},
    "stripped": {
        "normalizer": sequence(
            "normalizers",
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Lowercase"},
        )
    },
    "fewer spaces": {"normalizer": replace(" {2,}", " ", "Regex")},
    "shorter": {"normalizer": replace("abcdef", "ab")},
    "words": {"pre_tokenizer": sequence("pretokenizers", {"type": "Whitespace"}, byte_level())},
    "merged": {
        "pre_tokenizer": sequence(
            "pretokenizers", split(r"\s+") | {"behavior": "MergedWithNext"}, byte_level()
        )
    },
}
UNKNOWN: dict[str, dict[str, Any]] = {
    "Llama 2 without bytes": PUBLISHED["Llama 2"],
    "Unigram without bytes": PUBLISHED["Unigram"],
    "a byte is missing": {
        "model": _MODEL
        | {
            "vocab": {piece: n for piece, n in _MODEL["vocab"].items() if piece != "z"},
            "merges": [],
        }
    },
    "a byte is an added token": {
        "post_processor": None,
        "model": _MODEL
        | {
            "vocab": {piece: n for piece, n in _MODEL["vocab"].items() if piece != "z"},
            "merges": [],
        },
        "added_tokens": [
            {
                "id": 5000,
                "content": "z",
                "special": False,
                "normalized": True,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
        ],
    },
    "removed accents": {"normalizer": {"type": "StripAccents"}},
    "removed text": {"normalizer": replace("a", "")},
    "characters to a space": {"normalizer": replace("a", " ")},
    "character map": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap("nmt_nfkc")}
    },
    "removed words": {
        "pre_tokenizer": sequence(
            "pretokenizers", split(r"\s+") | {"behavior": "Removed"}, byte_level()
        )
    },
    "a step of an unknown shape": {"normalizer": replace("\\u0000+", "", "Regex")},
}
STRETCHES = (
    *("a", "z", " ", "\n", "\t", "\u3000", "\u00a0", "\x1c", "    ", "\x00", "\u200b", "\u00ad"),
    *("hello", "ABC", "abcdef", "123", "====", "<|eot_id|>", "</s>", "<0x41>", BLANK),
    *("e\u0301", "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345", "\u0300", "\ufb03", "\ufdfa"),
    *("\u65e5", "\U0001f600", "\U0010fffd"),
)


def texts() -> list[str]:
    rng = random.Random(3)
    mixed = ["".join(rng.choices(STRETCHES, k=rng.choice((3, 40, 400)))) for _ in range(60)]
    return [*(stretch * 300 for stretch in STRETCHES), *mixed, ""]


def check(tokenizer: Tokenizer, *, is_known: bool) -> None:
    for text in texts():
        least = tokenizer.least_tokens(text)
        for parse in (True, False):
            assert least <= len(tokenizer.encode(text, False, parse)), text[:80]
    least = tokenizer.least_tokens("hello " * 10_000)
    assert least > 100 if is_known else least == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("parts", KNOWN.values(), ids=KNOWN.keys())
def test_known_shapes(parts: dict[str, Any], tmp_path: Path) -> None:
    check(load(tmp_path / "known", **parts), is_known=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("parts", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_shapes_that_may_drop_characters(parts: dict[str, Any], tmp_path: Path) -> None:
    check(load(tmp_path / "unknown", **parts), is_known=False)


@pytest.mark.parametrize("metaspace", [False, True])
def test_byte_fallback(metaspace: bool, tmp_path: Path) -> None:
    llama_style(tmp_path / "copy", metaspace)
    check(Tokenizer.from_folder(tmp_path / "copy"), is_known=True)


def test_unigram_with_bytes(tmp_path: Path) -> None:
    model = unigram(BLANK, *(f"<0x{byte:02X}>" for byte in range(256)), f"{BLANK}the", "e")
    parts = PUBLISHED["Unigram"] | {"model": model | {"byte_fallback": True}}
    check(load(tmp_path / "known", **parts), is_known=True)


@pytest.mark.parametrize(
    ("rule", "has_bytes"),
    [("identity", True), ("identity", False), ("nmt_nfkc", True), ("nmt_nfkc", False)],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(rule: str, has_bytes: bool, kind: str, tmp_path: Path) -> None:
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(f"hello word {n} fox {n * 7} jumps" for n in range(200)),
        model_writer=model,
        vocab_size=300 if has_bytes else 44,
        user_defined_symbols="<|x|>",
        model_type=kind,
        normalization_rule_name=rule,
        byte_fallback=has_bytes,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = Tokenizer.from_folder(tmp_path)
    check(tokenizer, is_known=True)
    for text in (
        "<|x|>" * 500,
        "<s>hello</s>" * 300,
        "\u2603<|x|>\u0301" * 300,
        "<|x|> hello " * 99,
    ):
        for parse in (True, False):
            assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False, parse)), text[
                :80
            ]
    assert tokenizer.least_tokens("<|x|>" * 500) > 0


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char", "word"])
def test_pieces_of_normalized_text(kind: str) -> None:
    written = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(f"word {n} fox {n * 7} jumps é" for n in range(200)),
        model_writer=written,
        vocab_size=40,
        hard_vocab_limit=False,
        model_type=kind,
        normalization_rule_name="nmt_nfkc",
        user_defined_symbols="<|x|>",
        minloglevel=2,
    )
    model = written.getvalue()
    processor = load_processor(model, Path("m"))
    least = LeastPieces(processor, model)
    for text in (*texts(), "wxyz0123 " * 300, "o" * 2000, "\u2603o" * 900, "<|x|>" * 99):
        assert least.of(text) <= len(processor.encode(text)), text[:80]
    # a model of words knows the pieces of no long word
    assert least.of("word fox " * 10_000) > 1000 if kind != "word" else least.of("o" * 99) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("folder", [SPM, BPE, demo.path()], ids=["spm", "bpe", "demo"])
def test_tokenizers_of_models(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    check(tokenizer, is_known=True)
    if tokenizer.has_chat_template:
        for text in texts():
            chat = tokenizer.render_chat([{"role": "user", "content": text}])
            assert tokenizer.least_tokens(chat.text) <= len(chat.ids())


@pytest.mark.exhaustive
def test_what_is_counted_on_of_unicode() -> None:
    spaces = [c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()]
    assert max(spaces) < "\u3001"
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) == "Cs" or character.isspace():
            continue
        assert len(unicodedata.normalize("NFD", character)) <= 4
        for format in ("NFD", "NFKD", "NFC", "NFKC"):
            assert unicodedata.normalize(format, character).split()
        assert character.lower().split()


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    plain = Tokenizer.from_folder(BPE)
    threaded = plain.for_threads()
    text = "a" * 400_000
    for short in ("", "Hello  world\n", "a<|eot_id|>b \u65e5\U0001f600"):
        for parse in (True, False):
            ids = plain.encode(short, parse_special=parse)
            assert threaded.encode(short, parse_special=parse) == ids
            long = short + text[:50_000] + short
            assert threaded.encode(long, parse_special=parse) == plain.encode(
                long, parse_special=parse
            )
    gaps = [0.0]
    is_over = False

    def watch() -> None:
        last = time.monotonic()
        while not is_over:
            # it also needs the tokenizer
            threaded.encode("Hello")
            time.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    watcher = Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    threaded.encode(text)
    took = time.monotonic() - started
    is_over = True
    watcher.join()
    assert max(gaps) < took / 2

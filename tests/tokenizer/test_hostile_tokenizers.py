"""Vocabulary files made to explode end in one line; published kinds need no process of their own."""

import dataclasses
import json
import os
import shutil
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as LibraryTokenizer

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.tokenizer import tokenizer_json
from mlx_mmfree.tokenizer import tokenizer_json as confined_tokenizer
from mlx_mmfree.tokenizer.from_gguf import BYTE_LEVEL_PATTERNS
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.tokenizer.tokenizer_engine import TokenizerEngine
from mlx_mmfree.tokenizer.tokenizer_json import ConfinedTokenizer, JsonVocabulary, is_known

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SPM, BPE = GOLDENS / "tokenizer_spm", GOLDENS / "tokenizer_bpe"
DEMO = Path(__file__).parents[2] / "mlx_mmfree" / "demo" / "tokenizer.json"
BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


def document() -> dict[str, Any]:
    return dict(json.loads((BPE / "tokenizer.json").read_text()))


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def byte_level(**options: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, **options}


def template(pieces: int, ids: int) -> dict[str, Any]:
    special = [{"SpecialToken": {"id": "x", "type_id": 0}}] * pieces
    token = {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*special, text],
        "pair": [],
        "special_tokens": {"x": token},
    }


def unigram(*pieces: str) -> dict[str, Any]:
    return {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([p, -1.0] for p in pieces)]}


def load(folder: Path, **parts: Any) -> Tokenizer:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document() | parts))
    return Tokenizer.from_folder(folder)


def confines(tokenizer: Tokenizer) -> bool:
    vocabulary = tokenizer._vocabulary
    assert isinstance(vocabulary, JsonVocabulary)
    return isinstance(vocabulary._engine, ConfinedTokenizer)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that hostile files reach soon."""
    small = dataclasses.replace(
        confined_tokenizer.TOKENIZER_FILE, memory_bytes=96 * 2**20, seconds=0.5
    )
    monkeypatch.setattr(confined_tokenizer, "TOKENIZER_FILE", small)
    quick = dataclasses.replace(confined_tokenizer.TOKENIZED_TEXT, seconds=0.1)
    monkeypatch.setattr(confined_tokenizer, "TOKENIZED_TEXT", quick)


HOSTILE_FILES = {
    "replacements": {"normalizer": sequence("normalizers", *[replace("a", "a" * 10)] * 12)},
    "template": {"post_processor": template(5000, 5000)},
    "a frame in a frame": {"post_processor": sequence("processors", *[template(2, 1)] * 2)},
    "a template without its token": {"post_processor": template(1, 1) | {"special_tokens": {}}},
    "a character map": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": b64encode(b"\xff" * 4 + b"a" * 4000).decode(),
        }
    },
    "byte levels": {
        "pre_tokenizer": sequence("pretokenizers", *[byte_level(add_prefix_space=True)] * 30)
    },
    "prefixes": {
        "normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "b" * 99999}] * 40)
    },
    "a long unigram piece": {"model": unigram("a" * 3_000_000)},
    "a piece with no end": {"model": unigram("a", "") | {"unk_id": 7}},
    "a decoder's pattern": {"decoder": replace("(a{1,999}){1,999}", "b", "Regex")},
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("parts", HOSTILE_FILES.values(), ids=HOSTILE_FILES.keys())
def test_hostile_files(
    parts: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        (CheckpointError, UnsupportedModelError), match=r"tokenizer\.json'"
    ) as caught:
        load(tmp_path / "hostile", **parts)
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


HOSTILE_IN_USE = {
    "replacements": {"normalizer": sequence("normalizers", *[replace("aa", "a" * 20)] * 12)},
    "a pattern": {"pre_tokenizer": split(r"(?:(?:a+)+b\1?)+$|(a|aa)+$|(a*)*c")},
    "deep pieces": {"model": unigram("a", *("a" * n for n in range(2, 3000, 3)))},
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("parts", HOSTILE_IN_USE.values(), ids=HOSTILE_IN_USE.keys())
def test_files_that_load_and_make_texts_explode(
    parts: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load(tmp_path / "hostile", **parts)
    assert confines(tokenizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json' cannot encode this text"):
        tokenizer.encode("a" * 8000 + "!", False)
    # the next text meets a tokenizer that works
    assert tokenizer.encode("b", False) == tokenizer.encode("b", False) != []
    assert capfd.readouterr().err == ""


def test_decoders_that_lengthen_tokens_are_refused(tmp_path: Path) -> None:
    for number, steps in enumerate(([replace("a", "a" * 10)] * 9, [replace("", "b" * 9)] * 2)):
        with pytest.raises(UnsupportedModelError, match=r"may make it [0-9]+ times as long"):
            load(tmp_path / str(number), decoder=sequence("decoders", *steps))
    with pytest.raises(UnsupportedModelError, match="but has 17 steps"):
        load(tmp_path / "steps", decoder=sequence("decoders", *[replace("a", "b")] * 17))


def test_many_empty_lists_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_json, "_MAX_VALUES", 5000)
    for name, entry in (("lists", []), ("entries", 0)):
        with pytest.raises(CheckpointError, match="must hold at most 5,000 values"):
            load(tmp_path / name, extra=[entry] * 5000)


@pytest.mark.exhaustive
def test_a_published_size(tmp_path: Path) -> None:
    # Llama 3's file has 17 MB and a million values, Gemma's twice as many
    letters = [chr(0x4E00 + number) for number in range(560)]
    pairs = [(first, second) for first in letters for second in letters]
    pieces = [*letters, *map("".join, pairs)]
    model = {
        "type": "BPE",
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": pairs,
    }
    text = json.dumps({"version": "1.0", "added_tokens": [], "model": model}, ensure_ascii=False)
    (tmp_path / "tokenizer.json").write_text(text + " " * 10_000_000, encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).encode(pieces[-1]) == [len(pieces) - 1]


def test_repeated_keys_are_refused(tmp_path: Path) -> None:
    text = (BPE / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text('{"normalizer": null,' + text.lstrip()[1:])
    with pytest.raises(CheckpointError, match="must name each key once but repeats 'normalizer'"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_shape_gives_the_same_ids(tmp_path: Path) -> None:
    config = tmp_path / "confined" / "tokenizer_config.json"
    pre_tokenizer = document()["pre_tokenizer"]
    # a step that changes nothing in these texts
    parts = {"normalizer": replace("\\u0000+", "", "Regex"), "pre_tokenizer": pre_tokenizer}
    load(tmp_path / "confined", **parts)
    shutil.copyfile(BPE / "tokenizer_config.json", config)
    confined, plain = Tokenizer.from_folder(config.parent), Tokenizer.from_folder(BPE)
    assert confines(confined) and not confines(plain)
    assert confined.special_tokens == plain.special_tokens
    assert (confined.vocab_size, confined.eos_token_ids) == (plain.vocab_size, plain.eos_token_ids)
    talk = [{"role": "user", "content": "Hi <|eot_id|> there"}]
    assert confined.apply_chat_template(talk) == plain.apply_chat_template(talk)
    for text in ("", "Hello  world\n", "a<|eot_id|>b \u65e5\U0001f600"):
        for parse in (True, False):
            ids = plain.encode(text, parse_special=parse)
            assert confined.encode(text, parse_special=parse) == ids
            assert confined.decode(ids) == plain.decode(ids)


def varint(data: bytes, start: int) -> tuple[int, int]:
    """A number of a protobuf message and where the next field begins."""
    stop = start
    while data[stop] & 0x80:
        stop += 1
    return sum((byte & 0x7F) << 7 * n for n, byte in enumerate(data[start : stop + 1])), stop + 1


def field(data: bytes, wanted: int) -> bytes:
    """The last field of a protobuf message with a number, which holds bytes."""
    found, offset = b"", 0
    while offset < len(data):
        key, offset = varint(data, offset)
        size = {0: 0, 1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 in (0, 2):
            size, offset = varint(data, offset)
            size = size if key & 7 == 2 else 0
        if key >> 3 == wanted:
            found = data[offset : offset + size]
        offset += size
    return found


def charsmap(rule: str) -> str:
    model = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(f"word {n} fox {n * 7} jumps" for n in range(200)),
        model_writer=model,
        vocab_size=40,
        model_type="bpe",
        normalization_rule_name=rule,
        minloglevel=2,
    )
    return b64encode(field(field(model.getvalue(), 3), 2)).decode()


PREFIX = {"type": "Prepend", "prepend": BLANK}
METASPACE = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "first", "split": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT-2": {"normalizer": None, "pre_tokenizer": byte_level()},
    "Llama 2": {
        "normalizer": sequence("normalizers", PREFIX, replace(" ", BLANK)),
        "pre_tokenizer": None,
        "post_processor": template(1, 1),
    },
    "Llama 2, newer": {"normalizer": None, "pre_tokenizer": METASPACE},
    "Qwen": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": sequence(
            "pretokenizers", split(list(BYTE_LEVEL_PATTERNS)[1]), byte_level(use_regex=False)
        ),
        "post_processor": byte_level(),
    },
    "Falcon": {
        "normalizer": None,
        "pre_tokenizer": sequence(
            "pretokenizers",
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ),
    },
    "Unigram": {
        "model": unigram(BLANK, f"{BLANK}the", "e"),
        "normalizer": sequence("normalizers", replace(" {2,}", " ", "Regex")),
        "pre_tokenizer": METASPACE,
        "post_processor": None,
        "decoder": METASPACE,
    },
}


@pytest.mark.parametrize("parts", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_kinds_need_no_process(parts: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "known", **parts)
    assert not confines(tokenizer)
    library = LibraryTokenizer.from_file(str(tmp_path / "known" / "tokenizer.json"))
    ids = library.get_vocab(with_added_tokens=True)
    assert {tokenizer.id_to_piece(number): number for number in ids.values()} == ids
    assert all(tokenizer._vocabulary.token_id(piece) == number for piece, number in ids.items())


def test_the_packages_own_files_need_no_process() -> None:
    assert is_known(json.loads(DEMO.read_text()))
    assert is_known(document())


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_character_maps_of_sentencepiece_are_known(rule: str) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap(rule)}
    assert is_known(document() | {"normalizer": normalizer})
    engine = TokenizerEngine(json.dumps(document() | {"normalizer": normalizer}).encode(), [], [])
    assert engine.encode("\ufb01", True, "nothing") == engine.encode("fi", True, "nothing")


def test_a_normalizer_that_leaves_nothing_of_a_token_needs_a_process() -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    for is_normalized in (False, True):
        token = {"id": 5000, "content": " ", "normalized": is_normalized, **flags}
        parts = {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}
        assert is_known(document() | parts | {"added_tokens": [token]}) is not is_normalized


@pytest.mark.parametrize("name", ["tokenizer_spm", "tokenizer_bpe"])
def test_threads_that_load_leave_standard_error_alone(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(Tokenizer.from_folder, GOLDENS / name) for _ in range(60)]
        lines = 0
        while not all(entry.done() for entry in loads):
            os.write(2, b"x")
            lines += 1
        os.write(2, b"y")
    assert capfd.readouterr().err == "x" * lines + "y"

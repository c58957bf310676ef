"""Well-formed `tokenizer.json` files whose parts grow texts, nest, or ask for much."""

import base64
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.case import FuzzClass
from tests.fuzz.hostile import damage_json, odd_text
from tests.fuzz.tokenizing import use_tokenizer
from tests.hub.checkpoints import GOLDENS

_FILE = "tokenizer.json"
_COUNTS = (0, 1, 2, 8, 12, 30, 60, 300)
_LENGTHS = (0, 1, 2, 10, 1000, 100_000)
_REGEXES = (
    *("", "a", ".", "a*", "(a*)*b", "(a|aa)+$", "(?:a{1000}){1000}", "(.*)*x", "(?=a)", "^", "$"),
    *("\\p{L}+", "[", "(?<n>a)\\k<n>", "\\s+(?!\\S)|\\s+", "(?i:\u0130)", "a" * 20_000, "(" * 500),
    *("(x+x+)+y", "(?R)", "\\1", "[\\x00-\\U0010ffff]", "a{2147483647}", "(?>a+)+b", "\\X"),
)
Part = dict[str, Any]


def make_sources(folder: Path) -> None:
    """A byte-level tokenizer."""
    for name in (_FILE, "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / "tokenizer_bpe" / name, folder / name)


def mutate(sources: Path, target: Path, rng: random.Random) -> str:
    """Replaces parts of the tokenizer by others; some are damaged besides."""
    shutil.copytree(sources, target)
    document = json.loads((target / _FILE).read_text())
    changed: Part = {}
    for section in rng.sample(sorted(_PARTS), rng.choice((1, 1, 2, 3))):
        changed[section] = _chain(section, rng)
    if rng.random() < 0.3:
        changed["model"] = _model(rng)
    if rng.random() < 0.2:
        changed["added_tokens"] = [
            _added_token(number, rng) for number in range(rng.choice(_COUNTS))
        ]
    if rng.random() < 0.1:
        changed["truncation"] = {
            "direction": "Right",
            "max_length": rng.choice((0, 1, 2**40)),
            "strategy": "LongestFirst",
            "stride": rng.choice((0, 1, 2**40)),
        }
        changed["padding"] = {
            "strategy": {"Fixed": rng.choice((0, 10, 2**20, 2**40))},
            "direction": "Left",
            "pad_to_multiple_of": rng.choice((None, 0, 2**33)),
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        }
    data = json.dumps(document | changed).encode()
    if rng.random() < 0.3:
        data = damage_json(data, rng)
    (target / _FILE).write_bytes(data)
    return f"{len(data)} bytes, {json.dumps(changed):.300}"


def _chain(section: str, rng: random.Random) -> Part | None:
    """One part, a chain of equal or different parts, or chains in chains."""
    makers, key = _PARTS[section]
    kind = rng.random()
    if kind < 0.05:
        return None
    if kind < 0.4:
        return rng.choice(makers)(rng)
    if kind < 0.9:
        count = rng.choice(_COUNTS)
        one = rng.choice(makers)(rng)
        parts = [one if rng.random() < 0.7 else rng.choice(makers)(rng) for _ in range(count)]
        if len(json.dumps(one)) > 1000:
            parts = parts[:12]
        return {"type": "Sequence", key: parts}
    part = rng.choice(makers)(rng)
    for _ in range(rng.choice((1, 20, 100, 400))):
        part = {"type": "Sequence", key: [part] * rng.choice((1, 1, 1, 2) if _ < 8 else (1,))}
    return part


def _text(rng: random.Random) -> str:
    return rng.choice(("a", "ab", " ", "\u2581", "", "\u0130")) * rng.choice(_LENGTHS)


def _pattern(rng: random.Random) -> Part:
    return rng.choice(
        ({"String": rng.choice(("a", "", " ", "aa"))}, {"Regex": rng.choice(_REGEXES)})
    )


def _named(*names: str) -> Callable[[random.Random], Part]:
    return lambda rng: {"type": rng.choice(names)}


def _replace(rng: random.Random) -> Part:
    return {"type": "Replace", "pattern": _pattern(rng), "content": _text(rng)}


def _prepend(rng: random.Random) -> Part:
    return {"type": "Prepend", "prepend": _text(rng)}


def _charsmap(rng: random.Random) -> Part:
    size = rng.choice((0, 3, 4, 8, 1024, 4096))
    units = rng.choice((0, 4, 256, 1024, 2**31, 2**32 - 1)).to_bytes(4, "little")
    data = units + (rng.randbytes(size) if rng.random() < 0.7 else b"\xff" * size) + b"a\0" * 20
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def _strip(rng: random.Random) -> Part:
    count = rng.choice((0, 1, 2**31, 2**63))
    return {"type": "Strip", "content": "a", "start": count, "stop": count} | {
        f"strip_{side}": rng.random() < 0.5 for side in ("left", "right")
    }


def _bert(rng: random.Random) -> Part:
    names = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    return {"type": "BertNormalizer"} | {name: rng.random() < 0.5 for name in names}


def _byte_level(rng: random.Random) -> Part:
    names = ("add_prefix_space", "trim_offsets", "use_regex")
    return {"type": "ByteLevel"} | {name: rng.random() < 0.5 for name in names}


def _metaspace(rng: random.Random) -> Part:
    scheme = rng.choice(("always", "never", "first", "odd"))
    return {
        "type": "Metaspace",
        "replacement": rng.choice(("\u2581", "a", "", "ab")),
        "prepend_scheme": scheme,
        "split": rng.random() < 0.5,
    }


def _split(rng: random.Random) -> Part:
    behaviors = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    behavior = rng.choice(behaviors)
    invert = rng.random() < 0.3
    return {"type": "Split", "pattern": _pattern(rng), "behavior": behavior, "invert": invert}


def _fixed(rng: random.Random) -> Part:
    return {"type": "FixedLength", "length": rng.choice((0, 1, 2**40))}


def _template(rng: random.Random) -> Part:
    ids = [rng.choice((0, 5, 512, 2**31, 2**32 - 1))] * rng.choice((0, 1, 2, 100, 50_000))
    special = {"SpecialToken": {"id": "x", "type_id": rng.choice((0, 2**31))}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    single = [special] * rng.choice((0, 1, 3, 3000)) + [text] * rng.choice((0, 1, 1, 2, 300))
    tokens = {"x": {"id": "x", "ids": ids, "tokens": ["x"] * rng.choice((len(ids), 1))}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": tokens,
    }


def _pair_processor(rng: random.Random) -> Part:
    number = rng.choice((0, 5, 2**32 - 1))
    kind = rng.choice(("BertProcessing", "RobertaProcessing"))
    return {
        "type": kind,
        "sep": ["x" * rng.choice(_LENGTHS), number],
        "cls": ["a", number],
        "trim_offsets": True,
        "add_prefix_space": True,
    }


def _ctc(rng: random.Random) -> Part:
    delimiter = _text(rng)
    return {"type": "CTC", "pad_token": "a", "word_delimiter_token": delimiter, "cleanup": True}


def _suffix(rng: random.Random) -> Part:
    kind = rng.choice(("WordPiece", "BPEDecoder"))
    return {"type": kind, "prefix": _text(rng), "suffix": _text(rng), "cleanup": True}


def _added_token(number: int, rng: random.Random) -> Part:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    token = {"id": rng.choice((number, 512 + number, 2**32 - 1)), "content": odd_text(rng)[:500]}
    return token | {name: rng.random() < 0.5 for name in flags}


def _model(rng: random.Random) -> Part:
    size = rng.choice((0, 1, 3, 300, 5000))
    tokens = [f"p{n}" for n in range(size)] + ["a", "b", "ab", "\u2581", "<unk>", "##a"]
    vocab = {token: rng.choice((n, n, n, 2**32 - 1)) for n, token in enumerate(tokens)}
    unknown = rng.choice(("<unk>", "absent", None, ""))
    kind = rng.choice(("BPE", "Unigram", "WordPiece", "WordLevel"))
    if kind == "Unigram":
        scores = [[token, rng.choice((-1.0, 0.0, 1e300, -1e300, 5))] for token in tokens]
        number = rng.choice((None, 0, len(scores), 2**40))
        return {
            "type": kind,
            "unk_id": number,
            "vocab": scores,
            "byte_fallback": rng.random() < 0.5,
        }
    if kind == "BPE":
        merges = rng.choice(([], ["a b"], [["a", "b"]], ["a b"] * 3000, ["a"], [["x", "y"]]))
        return {
            "type": kind,
            "vocab": vocab,
            "merges": merges,
            "dropout": rng.choice((None, 0.5, 1.0, 2.0, -1)),
            "unk_token": unknown,
            "continuing_subword_prefix": rng.choice((None, "", "##", "a" * 1000)),
            "end_of_word_suffix": rng.choice((None, "", "</w>", "a" * 1000)),
            "fuse_unk": rng.random() < 0.5,
            "byte_fallback": rng.random() < 0.5,
            "ignore_merges": rng.random() < 0.5,
        }
    extra = {"continuing_subword_prefix": "##", "max_input_chars_per_word": rng.choice((0, 2**40))}
    return {"type": kind, "vocab": vocab, "unk_token": unknown, **extra}


_NORMALIZERS = _named("NFC", "NFKD", "NFKC", "NFD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")
_PRE_TOKENIZERS = _named("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")
_DECODERS = _named("Fuse", "ByteFallback")
_PARTS = {
    "normalizer": (
        (_replace, _replace, _prepend, _charsmap, _strip, _bert, _NORMALIZERS),
        "normalizers",
    ),
    "pre_tokenizer": (
        (_byte_level, _metaspace, _split, _split, _fixed, _PRE_TOKENIZERS),
        "pretokenizers",
    ),
    "post_processor": ((_template, _template, _byte_level, _pair_processor), "processors"),
    "decoder": (
        (_replace, _replace, _byte_level, _metaspace, _strip, _ctc, _suffix, _DECODERS),
        "decoders",
    ),
}
# the library's own process for unknown shapes may take a gigabyte
CLASS = FuzzClass(make_sources, mutate, use_tokenizer, memory_bytes=1_300_000_000)

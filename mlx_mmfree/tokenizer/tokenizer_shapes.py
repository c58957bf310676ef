"""Tells which `tokenizer.json` files are built like published ones and so can be used without limits.

The package `tokenizers` ends the program or hangs on files whose steps multiply the text, whose patterns
backtrack without end or whose tables are out of bounds. A file has a known shape if the work and the
result of each of its parts grow only with the text. It need not be correct.
"""

import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any

from .from_gguf import BYTE_LEVEL_PATTERNS
from .piece_decoder import BYTE_CHARACTERS

_MAX_STEPS = 8
_MAX_GROWTH = 64
# one character becomes at most so many in a compatibility form of Unicode
_COMPATIBILITY_GROWTH = 18
_MAX_ADDED_TOKENS, _MAX_ADDED_LENGTH = 20_000, 256
_MAX_UNIGRAM_PIECES, _MAX_UNIGRAM_LENGTH = 1_000_000, 64
_MAX_UNIGRAM_CHARACTERS = 4_000_000
_MAX_FRAME_PIECES = 16
# the packaged model's vocabulary, and others that this library trained, split texts so
_OLDER_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLIT_PATTERNS = frozenset((*BYTE_LEVEL_PATTERNS, _OLDER_PATTERN, r"[0-9][0-9][0-9]", r"\s+"))
_REPLACED_PATTERNS = frozenset((" {2,}", r"\s+", r"[\n\r\t]", r"\n"))
# SHA-256 of SentencePiece's tables for its rules nmt_nfkc, nfkc, nmt_nfkc_cf and nfkc_cf
_CHARACTER_MAPS = frozenset(
    (
        "1e2c7b43d3ee9755ceaa2ac335e253d8703604e0249ee1e81156c92b46423844",
        "7e46d9e08af4b6a37991b04fb8388644c1595a0abcd0f26d6a5d575e2a3663ea",
        "2c03512e62f9ed965ec90d85314211b63b5b8aa0395311ea2147eec9ff738907",
        "d8dfef3d6db0eef0742f8b55a73aee7fce6c1e21d26a09b8d3d4b52c42a791cb",
    )
)
_NORMALIZER_GROWTHS = {
    "BertNormalizer": 3,
    "Lowercase": 3,
    "NFC": 3,
    "NFD": 4,
    "NFKC": _COMPATIBILITY_GROWTH,
    "NFKD": _COMPATIBILITY_GROWTH,
    "Nmt": 1,
    "Strip": 1,
    "StripAccents": 1,
}
# no more than four characters are composed to one
_NORMALIZER_SHRINKAGES = {
    "Lowercase": 1,
    "NFC": 4,
    "NFD": 1,
    "NFKC": 4,
    "NFKD": 1,
    "Prepend": 1,
    "Replace": 1,
    "Strip": 1,
}
_PLAIN_PRE_TOKENIZERS = frozenset(
    ("BertPreTokenizer", "Digits", "Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit")
)
_DECODERS = frozenset(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"))


def is_known(document: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json` may be read and used without limits on time and memory."""
    return (
        _is_known_model(document.get("model"))
        and _normalizer_growth(document.get("normalizer")) <= _MAX_GROWTH
        and _are_known_pre_tokenizers(document.get("pre_tokenizer"))
        and _are_known_post_processors(document.get("post_processor"))
        and _are_known_decoders(document.get("decoder"))
        and _are_known_tokens(document.get("added_tokens", []))
    )


def longest_stretch(document: Mapping[str, Any], added: Collection[str]) -> int | None:
    """The most characters of a text, but spaces, that one token can stand for.

    Args:
        document: A file of a known shape.
        added: The tokens beside those of its model.

    Returns:
        The number; `None` if a step may drop characters, or a token stand for any number of them.
    """
    steps = _steps(document.get("normalizer"), "normalizers") or []
    splits = _steps(document.get("pre_tokenizer"), "pretokenizers") or []
    pieces = listed_ids(document["model"])
    are_bytes = any(step["type"] == "ByteLevel" for step in splits)
    has_fallback = document["model"].get("byte_fallback") is True
    needed = BYTE_CHARACTERS if are_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    # what has no token of its own is left out, or is one unknown token however long it is
    is_covered = (are_bytes or has_fallback) and all(piece in pieces for piece in needed)
    shrinkage = math.prod(map(_step_shrinkage, steps))
    if not is_covered or shrinkage == math.inf:
        return None
    if any(step.get("behavior") == "Removed" for step in splits):
        return None
    return int(shrinkage) * max(map(len, (*pieces, *added)))


def _step_shrinkage(step: Mapping[str, Any]) -> float:
    """How many characters, but spaces, a normalizer makes one of; infinity if it may drop some."""
    kind = step.get("type")
    if kind == "Replace" and "String" in step["pattern"]:
        before, after = (
            len("".join(text.split())) for text in (step["pattern"]["String"], step["content"])
        )
        if before and not after:
            return math.inf
        return max(1, math.ceil(before / max(after, 1)))
    return _NORMALIZER_SHRINKAGES.get(str(kind), math.inf)


def listed_ids(model: Mapping[str, Any]) -> dict[str, int]:
    """The ids by piece of a model of a known shape."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}


def _is_known_model(model: Any) -> bool:
    if not isinstance(model, dict):
        return False
    vocabulary = model.get("vocab")
    if model.get("type") == "BPE":
        whole = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        return isinstance(vocabulary, dict) and all(not model.get(name) for name in whole)
    if model.get("type") != "Unigram" or not isinstance(vocabulary, list):
        return False
    if not 0 < len(vocabulary) <= _MAX_UNIGRAM_PIECES or not all(map(_is_scored, vocabulary)):
        return False
    sizes = [len(piece) for piece, _ in vocabulary]
    unknown = model.get("unk_id")
    has_unknown = type(unknown) is int and 0 <= unknown < len(vocabulary)
    small = max(sizes) <= _MAX_UNIGRAM_LENGTH and sum(sizes) <= _MAX_UNIGRAM_CHARACTERS
    return has_unknown and min(sizes) > 0 and small


def _is_scored(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    return type(entry[1]) in (int, float) and math.isfinite(entry[1])


def _steps(part: Any, name: str) -> list[Mapping[str, Any]] | None:
    """The steps of a sequence, or a single step; `None` if it is neither."""
    if part is None:
        return []
    if not isinstance(part, dict):
        return None
    steps = part.get(name) if part.get("type") == "Sequence" else [part]
    if not isinstance(steps, list) or len(steps) > _MAX_STEPS:
        return None
    return steps if all(isinstance(step, dict) for step in steps) else None


def _normalizer_growth(part: Any) -> float:
    """How many characters one can become; infinity if that is not known."""
    steps = _steps(part, "normalizers")
    return math.inf if steps is None else math.prod(map(_step_growth, steps))


def _step_growth(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if isinstance(kind, str) and kind in _NORMALIZER_GROWTHS:
        return _NORMALIZER_GROWTHS[kind]
    if kind == "Prepend":
        return 1 if _is_short(step.get("prepend")) else math.inf
    if kind == "Replace":
        return _replacement_growth(step)
    if kind == "Precompiled" and _is_known_map(step.get("precompiled_charsmap")):
        return _COMPATIBILITY_GROWTH
    return math.inf


def _replacement_growth(step: Mapping[str, Any]) -> float:
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(pattern, dict) or len(pattern) != 1 or not isinstance(content, str):
        return math.inf
    [(kind, text)] = pattern.items()
    if kind == "Regex" and text in _REPLACED_PATTERNS and len(content) <= 1:
        return 1
    if kind == "String" and isinstance(text, str) and text:
        return max(1, math.ceil(len(content) / len(text)))
    return math.inf


def _is_known_map(text: Any) -> bool:
    try:
        data = b64decode(text, validate=True) if isinstance(text, str) else b""
    except (Base64Error, ValueError):
        return False
    return sha256(data).hexdigest() in _CHARACTER_MAPS


def _is_short(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= _MAX_STEPS


def _are_known_pre_tokenizers(part: Any) -> bool:
    steps = _steps(part, "pretokenizers")
    if steps is None or not all(map(_is_known_pre_tokenizer, steps)):
        return False
    # each of these writes several characters for one, and two of a kind multiply
    return all(
        sum(step["type"] == kind for step in steps) < 2 for kind in ("ByteLevel", "Metaspace")
    )


def _is_known_pre_tokenizer(step: Mapping[str, Any]) -> bool:
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Split" and isinstance(pattern, dict):
        regex = pattern.get("Regex")
        return (
            regex in _SPLIT_PATTERNS if isinstance(regex, str) else _is_short(pattern.get("String"))
        )
    if kind == "Metaspace":
        mark = step.get("replacement")
        return isinstance(mark, str) and len(mark) == 1
    return kind == "ByteLevel" or (isinstance(kind, str) and kind in _PLAIN_PRE_TOKENIZERS)


def _are_known_post_processors(part: Any) -> bool:
    steps = _steps(part, "processors")
    if steps is None or not all(map(_is_known_post_processor, steps)):
        return False
    # the package panics if one adds a frame to the frame of another
    return sum(step["type"] != "ByteLevel" for step in steps) < 2


def _is_known_post_processor(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "ByteLevel":
        return True
    if kind in ("BertProcessing", "RobertaProcessing"):
        return all(_is_named_id(step.get(name)) for name in ("sep", "cls"))
    if kind != "TemplateProcessing":
        return False
    tokens = step.get("special_tokens")
    if not isinstance(tokens, dict) or not all(map(_is_framing_token, tokens.values())):
        return False
    return all(_is_known_frame(step.get(name), tokens) for name in ("single", "pair"))


def _is_named_id(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and type(entry[1]) is int


def _is_framing_token(token: Any) -> bool:
    ids = token.get("ids") if isinstance(token, dict) else None
    return isinstance(ids, list) and len(ids) == 1 and type(ids[0]) is int


def _is_known_frame(pieces: Any, tokens: Mapping[str, Any]) -> bool:
    if not isinstance(pieces, list) or len(pieces) > _MAX_FRAME_PIECES:
        return False
    for piece in pieces:
        kind, entry = next(iter(piece.items())) if isinstance(piece, dict) and piece else ("", None)
        name = entry.get("id") if isinstance(entry, dict) else None
        if not isinstance(name, str) or (kind == "SpecialToken" and name not in tokens):
            return False
    return True


def _are_known_decoders(part: Any) -> bool:
    steps = _steps(part, "decoders")
    return steps is not None and all(map(_is_known_decoder, steps))


def _is_known_decoder(step: Mapping[str, Any]) -> bool:
    # this library decodes texts itself, so the package only reads the section
    pattern = step.get("pattern")
    is_fixed = pattern is None or (isinstance(pattern, dict) and "Regex" not in pattern)
    return step.get("type") in _DECODERS and is_fixed


def _are_known_tokens(tokens: Any) -> bool:
    if not isinstance(tokens, list) or len(tokens) > _MAX_ADDED_TOKENS:
        return False
    contents = [token.get("content") if isinstance(token, dict) else None for token in tokens]
    return all(isinstance(c, str) and 0 < len(c) <= _MAX_ADDED_LENGTH for c in contents)

"""Vocabularies in the `tokenizer.json` format, through the package `tokenizers`.

The package ends the program or hangs on files whose steps multiply the text, whose patterns backtrack
without end or whose tables are out of bounds. So only files that are built like published ones are used
in this process, and all others in a process with limits. A file has a known shape if the work and the
result of each of its parts grow only with the text. It need not be correct.

The package decodes whole texts only, and its work for each new token would grow with the text. So the
decoder section of a file is applied here, to one token at a time.
"""

import codecs
import math
import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from ..files.reading import parse_json_object
from ..platform.confinement.policy import TOKENIZED_TEXT, TOKENIZER_FILE
from . import vocabulary
from .from_gguf import BYTE_LEVEL_PATTERNS
from .tokenizer_engine import Added, Description, TokenizerEngine

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_DECODER_GROWTH, _MAX_DECODER_STEPS = 16, 16
_STEPS = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for bytes: most bytes stand for themselves, the others follow 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_CHARACTERS = _byte_alphabet()


class PieceDecoder:
    """Gives the bytes that a token adds to a text.

    Runs of byte tokens are decoded character by character. A byte that fits nowhere becomes U+FFFD and
    leaves its neighbours alone.

    Args:
        state: The decoder section; `None` if the file has none.
        file: The file it was read from, for messages.

    Raises:
        UnsupportedModelError: The section needs several tokens at once, or makes tokens much longer.
    """

    def __init__(self, state: Mapping[str, Any] | None, file: Path) -> None:
        self._joins_with_spaces = state is None
        self._steps: list[Callable[[str, bool], str | bytes]] = []
        self._strip = ""
        self.utf8_errors = "replace"
        fused = False
        growth = 1
        steps = [] if state is None else [state]
        while steps:
            step = steps.pop(0)
            kind = step.get("type")
            if kind == "Sequence":
                steps[:0] = step["decoders"]
            elif kind == "ByteLevel":
                self._steps.append(_from_byte_level)
            elif kind == "ByteFallback":
                self._steps.append(_from_byte_piece)
                self.utf8_errors = vocabulary.EACH_BYTE
            elif kind == "Metaspace":
                self._steps.append(_metaspace(step))
            elif kind == "Replace" and "String" in step["pattern"]:
                pattern, content = step["pattern"]["String"], step["content"]
                growth *= _growth(pattern, content)
                self._steps.append(_replace(pattern, content))
            elif kind == "Strip" and fused and not step["stop"] and step["start"] <= 1:
                self._strip = step["content"] if step["start"] else ""
            elif kind == "Fuse":
                fused = True
            else:
                raise UnsupportedModelError(
                    f"[tokenizer] '{file}': the decoder must be made of {', '.join(_STEPS)}, each of "
                    f"which can decode one token alone, but has {kind!r:.40} with settings that cannot. "
                    "Use a byte-level or SentencePiece vocabulary."
                )

        if growth > _MAX_DECODER_GROWTH or len(self._steps) > _MAX_DECODER_STEPS:
            raise UnsupportedModelError(
                f"[tokenizer] '{file}': the decoder must have at most {_MAX_DECODER_STEPS} steps and "
                f"make a token at most {_MAX_DECODER_GROWTH} times as long as it is spelled, but has "
                f"{len(self._steps)} steps and may make it {growth} times as long. Download it again."
            )

    def __call__(self, piece: str, at_start: bool) -> bytes:
        value: str | bytes = piece
        for step in self._steps:
            if isinstance(value, bytes):
                break
            value = step(value, at_start)
        raw = value.encode() if isinstance(value, str) else value
        if at_start:
            return raw.removeprefix(self._strip.encode()) if self._strip else raw
        return b" " + raw if self._joins_with_spaces else raw


def _from_byte_level(piece: str, at_start: bool) -> bytes:
    if all(character in BYTE_CHARACTERS for character in piece):
        return bytes(BYTE_CHARACTERS[character] for character in piece)
    return piece.encode()


def _from_byte_piece(piece: str, at_start: bool) -> str | bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match.group(1)) if match else piece


def _replace(pattern: str, content: str) -> Callable[[str, bool], str]:
    return lambda piece, at_start: piece.replace(pattern, content)


def _growth(pattern: str, content: str) -> int:
    """How many times as long a replacement can make a text."""
    if not pattern:
        return 1 + 2 * len(content)
    return max(1, math.ceil(len(content) / len(pattern)))


def _metaspace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    mark, keeps_first = step["replacement"], step.get("prepend_scheme") == "never"
    return lambda piece, at_start: piece.replace(mark, "" if at_start and not keeps_first else " ")


_MAX_STEPS = 8
_MAX_GROWTH = 64
# one character becomes at most so many in a compatibility form of Unicode
_COMPATIBILITY_GROWTH = 18
_MAX_ADDED_TOKENS, _MAX_ADDED_LENGTH = 20_000, 256
_MAX_UNIGRAM_PIECES, _MAX_UNIGRAM_LENGTH = 1_000_000, 64
_MAX_UNIGRAM_CHARACTERS = 4_000_000
_MAX_FRAME_PIECES = 16
# the bundled model's vocabulary, and others that this library trained, split texts so
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
_DROPPING_NORMALIZERS = frozenset(("BertNormalizer", "Nmt", "Strip", "StripAccents"))
_PLAIN_PRE_TOKENIZERS = frozenset(
    ("BertPreTokenizer", "Digits", "Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit")
)
_SECTIONS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The parts of a file that are steps, and what each calls them in a sequence."""
_DECODERS = frozenset(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"))


def is_known(document: Mapping[str, Any]) -> bool:
    """Returns whether a `tokenizer.json` may be read and used without limits on time and memory."""
    model: Any = document.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "BPE":
        whole = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        is_plain = isinstance(model.get("vocab"), dict) and not any(map(model.get, whole))
    else:
        is_plain = kind == "Unigram" and _is_known_unigram(model)
    sections = [_steps(document.get(part), name) for part, name in _SECTIONS.items()]
    if not is_plain or None in sections:
        return False
    normalizers, pre_tokenizers, processors, decoders = (steps or [] for steps in sections)
    if math.prod(map(_step_growth, normalizers)) > _MAX_GROWTH:
        return False
    for step in pre_tokenizers:
        kind, pattern = step.get("type"), step.get("pattern")
        if kind == "Split" and isinstance(pattern, dict):
            regex, text = pattern.get("Regex"), pattern.get("String")
            is_fixed = regex in _SPLIT_PATTERNS if isinstance(regex, str) else _is_short(text)
        elif kind == "Metaspace":
            mark = step.get("replacement")
            is_fixed = isinstance(mark, str) and len(mark) == 1
        else:
            is_fixed = isinstance(kind, str) and kind in {"ByteLevel", *_PLAIN_PRE_TOKENIZERS}
        if not is_fixed:
            return False
    # each of these writes several characters for one, and two of a kind multiply
    kinds = [step["type"] for step in pre_tokenizers]
    if any(kinds.count(kind) > 1 for kind in ("ByteLevel", "Metaspace")):
        return False
    # the package panics if one adds a frame to the frame of another
    frames = [step for step in processors if step.get("type") != "ByteLevel"]
    if len(frames) > 1 or not all(map(_is_known_frame, frames)):
        return False
    for step in decoders:
        # this library decodes texts itself, so the package only reads the section
        kind, pattern = step.get("type"), step.get("pattern")
        is_fixed = pattern is None or (isinstance(pattern, dict) and "Regex" not in pattern)
        if not is_fixed or not isinstance(kind, str) or kind not in _DECODERS:
            return False
    tokens = document.get("added_tokens", [])
    if not isinstance(tokens, list) or len(tokens) > _MAX_ADDED_TOKENS:
        return False
    contents = [token.get("content") if isinstance(token, dict) else None for token in tokens]
    # the package panics where a normalizer leaves nothing of an added token
    if any(step["type"] in _DROPPING_NORMALIZERS for step in normalizers) and any(
        token.get("normalized") for token in tokens if isinstance(token, dict)
    ):
        return False
    return all(isinstance(c, str) and 0 < len(c) <= _MAX_ADDED_LENGTH for c in contents)


def longest_stretch(
    document: Mapping[str, Any], pieces: Collection[str], added: Collection[str]
) -> int | None:
    """The most characters of a text, but spaces, that one token can stand for.

    Args:
        document: A file of a known shape.
        pieces: The tokens of its model.
        added: The tokens beside them.

    Returns:
        The number; `None` if a step may drop characters, or a token stand for any number of them.
    """
    steps = _steps(document.get("normalizer"), "normalizers") or []
    splits = _steps(document.get("pre_tokenizer"), "pretokenizers") or []
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


def keeps_spaces(document: Mapping[str, Any], special: Sequence[tuple[Any, ...]]) -> bool:
    """Returns whether each space of a text is a part of a token.

    Args:
        document: A file of a known shape.
        special: The tokens that text may spell, as in `Description`.
    """
    splits = _steps(document.get("pre_tokenizer"), "pretokenizers") or []
    kinds = {step["type"] for step in splits}
    are_bytes = "ByteLevel" in kinds and kinds <= {"ByteLevel", "Digits", "Split"}
    strips = [
        (token.get("lstrip"), token.get("rstrip")) for token in document.get("added_tokens", [])
    ]
    strips += [(lstrip, rstrip) for _, _, lstrip, rstrip, _ in special]
    return are_bytes and not document.get("normalizer") and not any(map(any, strips))


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


def _is_known_unigram(model: Mapping[str, Any]) -> bool:
    pieces = model.get("vocab")
    if not isinstance(pieces, list):
        return False
    if not 0 < len(pieces) <= _MAX_UNIGRAM_PIECES or not all(map(_is_scored, pieces)):
        return False
    sizes = [len(piece) for piece, _ in pieces]
    unknown = model.get("unk_id")
    has_unknown = type(unknown) is int and 0 <= unknown < len(pieces)
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


def _step_growth(step: Mapping[str, Any]) -> float:
    """How many characters a normalizer can make of one; infinity if that is not known."""
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


def _is_known_frame(step: Mapping[str, Any]) -> bool:
    """Returns whether a post-processor puts a known number of tokens around a text."""
    kind, tokens = step.get("type"), step.get("special_tokens")
    if kind in ("BertProcessing", "RobertaProcessing"):
        pairs = [step.get(name) for name in ("sep", "cls")]
        return all(isinstance(p, list) and len(p) == 2 and type(p[1]) is int for p in pairs)
    if kind != "TemplateProcessing" or not isinstance(tokens, dict):
        return False
    for token in tokens.values():
        ids = token.get("ids") if isinstance(token, dict) else None
        if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int:
            return False
    for pieces in (step.get("single"), step.get("pair")):
        if not isinstance(pieces, list) or len(pieces) > _MAX_FRAME_PIECES:
            return False
        for piece in pieces:
            known = isinstance(piece, dict) and piece
            kind, entry = next(iter(piece.items())) if known else ("", None)
            name = entry.get("id") if isinstance(entry, dict) else None
            if not isinstance(name, str) or (kind == "SpecialToken" and name not in tokens):
                return False
    return True


def _of_engine(tokens: Collection[vocabulary.SpecialToken]) -> list[Added]:
    return [
        (t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for t in tokens
        if t.content
    ]


def _are_few(tokens: Collection[vocabulary.SpecialToken]) -> bool:
    """Returns whether other files add tokens that a file of a known shape may have."""
    return len(tokens) <= _MAX_ADDED_TOKENS and all(
        len(token.content) <= _MAX_ADDED_LENGTH for token in tokens
    )


class ConfinedTokenizer:
    """Does what a `TokenizerEngine` does, in a confined process.

    All methods raise a `LimitError` if the process fails, takes too long or takes too much memory.

    Args:
        data: The content of the file.
        listed: As of `TokenizerEngine`.
        roles: As of `TokenizerEngine`.
    """

    def __init__(self, data: bytes, listed: list[Added], roles: list[Added]) -> None:
        self._arguments = (data, listed, roles)
        self._process = TOKENIZER_FILE.process()

    def read(self) -> tuple[Description, dict[str, int]]:
        """Reads the file, and gives its description and the ids by piece."""
        answer = self._process.ask(("read", self._arguments), TOKENIZER_FILE.seconds)
        found = Description(
            special=[(*token,) for token in answer["special"]],
            frame=(answer["frame"][0], answer["frame"][1]),
            decoder=answer["decoder"],
            added=answer["added"],
            new=answer["new"],
        )
        return found, answer["ids"]

    def encode(self, text: str, split_special: bool, before: vocabulary.Before) -> list[int]:
        """The ids of a text. If the last text ended the process, another one opens the file."""
        if self._process.process_id is None:
            self.read()
        seconds = TOKENIZED_TEXT.seconds_for(len(text))
        ids: list[int] = self._process.ask(("encode", (text, split_special, before)), seconds)[
            "ids"
        ]
        return ids


# characters; the package encodes so many in some hundredths of a second, in which no other thread runs
_LONG_TEXT = 10_000
# each value is a Python object; the largest published files have half as many
_MAX_VALUES = 4_000_000


def parse_document(data: bytes, file: Path) -> dict[str, Any]:
    """The content of a `tokenizer.json`, of which the largest have tens of megabytes."""
    return parse_json_object(
        data.removeprefix(codecs.BOM_UTF8),
        f"'{file}'",
        max_bytes=vocabulary.MAX_VOCABULARY_BYTES,
        max_values=_MAX_VALUES,
    )


class JsonVocabulary:
    """The vocabulary of one `tokenizer.json`.

    Args:
        file: The file.
        settings: What the files beside it say.

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedModelError: The file asks for something that is not supported.
    """

    parses_special = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, file: Path, settings: vocabulary.TokenizerSettings) -> None:
        self._file = file
        self._lock = Lock()
        # encodes long texts; `None`: as all others
        self._apart: JsonVocabulary | None = None
        data = vocabulary.read_limited(file, vocabulary.MAX_VOCABULARY_BYTES).removeprefix(
            codecs.BOM_UTF8
        )
        self._source = data, _of_engine(settings.tokens), _of_engine(settings.roles)
        self._engine: TokenizerEngine | ConfinedTokenizer
        with vocabulary.clean_errors(f"'{file}' is damaged or not a tokenizer.json"):
            document = parse_document(data, file)
            model = document.get("model")
            if isinstance(model, dict) and model.get("continuing_subword_prefix"):
                raise UnsupportedModelError(
                    f"[tokenizer] '{file}': the model must have no 'continuing_subword_prefix' but has "
                    "one. Use a byte-level or SentencePiece vocabulary."
                )
            self._longest: int | None = None
            self._keeps_spaces = False
            if is_known(document) and _are_few([*settings.tokens, *settings.roles]):
                self._engine = TokenizerEngine(*self._source)
                found = self._engine.description
                # the package takes as long to give out its table as to read the file
                pieces = document["model"]["vocab"]
                if isinstance(pieces, list):
                    pieces = {piece: number for number, (piece, _) in enumerate(pieces)}
                self._ids = pieces | found.added
                self._longest = longest_stretch(document, pieces, found.added)
                self._keeps_spaces = keeps_spaces(document, found.special)
            else:
                self._engine = ConfinedTokenizer(*self._source)
                found, self._ids = self._engine.read()
            self._decode = PieceDecoder(found.decoder, file)
        if not self._ids:
            raise CheckpointError(
                f"[tokenizer] '{file}' must hold tokens but holds none. Download it again."
            )
        self._pieces = {number: piece for piece, number in self._ids.items()}
        self._check_ids(settings.tokens, found.new)
        self.frame = found.frame
        if unknown := [n for n in (*found.frame[0], *found.frame[1]) if n not in self._pieces]:
            raise CheckpointError(
                f"[tokenizer] '{file}': the tokenizer must put tokens of its vocabulary around a text "
                f"but puts {unknown[0]}. Download the tokenizer files again."
            )
        self.utf8_errors = self._decode.utf8_errors
        self.vocab_size = max(self._pieces) + 1
        self.special = vocabulary.SpecialTokens(
            vocabulary.SpecialToken(text, number, True, *flags)
            for text, number, *flags in found.special
        )

    def _check_ids(self, tokens: tuple[vocabulary.SpecialToken, ...], new: Collection[str]) -> None:
        """Refuses ids of new tokens that leave others out, since new tokens get the ids that follow."""
        for token in tokens:
            number = self._ids.get(token.content)
            if token.content in new and number != token.id and token.id not in self._pieces:
                raise CheckpointError(
                    f"[tokenizer] '{self._file}' must have a token for each id below {token.id}, which "
                    f"'tokenizer_config.json' gives to {token.content!r:.60}, but it would get "
                    f"{number}. Save the tokenizer again with all its tokens."
                )

    def encode(
        self, text: str, before: vocabulary.Before = "nothing", *, parse_special: bool = False
    ) -> list[int]:
        """The ids of a text, in which special tokens that it spells may become those tokens."""
        if parse_special and before != "nothing":
            return vocabulary.encode_split(self.encode, self.special.split(text), before)
        if self._apart is not None and len(text) > _LONG_TEXT:
            return self._apart.encode(text, before, parse_special=parse_special)
        with self._lock:
            try:
                return self._engine.encode(text, not parse_special, before)
            except BaseException as error:
                vocabulary.raise_clean(
                    error, f"'{self._file}' cannot encode this text", vocabulary.CHANGE_THE_TEXT
                )

    def id_to_piece(self, token_id: int) -> str:
        """The text of a token as the file spells it."""
        return self._pieces[token_id]

    def token_id(self, piece: str) -> int | None:
        """The id of a token; `None` if there is none."""
        return self._ids.get(piece)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text."""
        return self._decode(self._pieces[token_id], at_start)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least; 0 if one token may stand for any part of it."""
        if self._longest is None:
            return 0
        return vocabulary.least_tokens(text, self._longest, self._keeps_spaces)

    def for_threads(self) -> "JsonVocabulary":
        """The same vocabulary, which encodes long texts in a process of its own."""
        apart, other = copy(self), copy(self)
        apart._lock = Lock()
        apart._engine = ConfinedTokenizer(*self._source)
        other._apart = apart
        return other

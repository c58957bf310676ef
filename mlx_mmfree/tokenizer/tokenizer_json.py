"""Vocabularies in the `tokenizer.json` format, through the package `tokenizers`."""

import codecs
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from ..files.json_file import parse_json_object
from .compiled_code import CHANGE_THE_TEXT, clean_errors
from .confined_tokenizer import ConfinedTokenizer
from .piece_decoder import PieceDecoder
from .special_tokens import Before, SpecialToken, SpecialTokens
from .tokenizer_engine import TokenizerEngine
from .tokenizer_files import MAX_VOCABULARY_BYTES, TokenizerSettings, read_limited
from .tokenizer_shapes import is_known, listed_ids, longest_stretch
from .vocabulary import encode_split

# characters; the package encodes so many in some hundredths of a second, in which no other thread runs
_LONG_TEXT = 10_000
# each value is a Python object; the largest published files have half as many
_MAX_VALUES = 4_000_000


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

    def __init__(self, file: Path, settings: TokenizerSettings) -> None:
        self._file = file
        self._lock = Lock()
        # encodes long texts; `None`: as all others
        self._apart: JsonVocabulary | None = None
        data = read_limited(file, MAX_VOCABULARY_BYTES).removeprefix(codecs.BOM_UTF8)
        special = _special_tokens(settings)
        self._source = data, special
        self._engine: TokenizerEngine | ConfinedTokenizer
        with clean_errors(f"'{file}' is damaged or not a tokenizer.json"):
            document = _document(data, file)
            self.longest: int | None = None
            if is_known(document):
                self._engine = TokenizerEngine(data, special)
                found = self._engine.describe()
                added = self._engine.added_ids()
                # the package takes as long to give out its table as to read the file
                self._ids = listed_ids(document["model"]) | added
                self.longest = longest_stretch(document, added)
            else:
                self._engine = ConfinedTokenizer(data, special)
                found, self._ids = self._engine.read()
            self._decode = PieceDecoder(found.decoder, file)
        if not self._ids:
            raise CheckpointError(
                f"[tokenizer] '{file}' must hold tokens but holds none. Download it again."
            )
        self._pieces = {number: piece for piece, number in self._ids.items()}
        self.frame = found.frame
        self.utf8_errors = self._decode.utf8_errors
        self.vocab_size = max(self._pieces) + 1
        self.special = SpecialTokens(
            SpecialToken(text, number, True, *flags) for text, number, *flags in found.special
        )

    def encode_parsed(self, text: str, before: Before = "nothing") -> list[int]:
        """The ids of a text in which special tokens that it spells become those tokens."""
        if before == "nothing":
            return self._encode(text, False, before)
        return encode_split(self.encode_plain, self.special.split(text), before)

    def encode_plain(self, text: str, before: Before = "nothing") -> list[int]:
        """The ids of a plain text."""
        return self._encode(text, True, before)

    def piece(self, token_id: int) -> str:
        """The text of a token as the file spells it."""
        return self._pieces[token_id]

    def token_id(self, piece: str) -> int | None:
        """The id of a token; `None` if there is none."""
        return self._ids.get(piece)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text."""
        return self._decode(self.piece(token_id), at_start)

    def for_threads(self) -> "JsonVocabulary":
        """The same vocabulary, which encodes long texts in a process of its own."""
        apart, other = copy(self), copy(self)
        apart._lock = Lock()
        apart._engine = ConfinedTokenizer(*self._source)
        other._apart = apart
        return other

    def _encode(self, text: str, split_special: bool, before: Before) -> list[int]:
        if self._apart is not None and len(text) > _LONG_TEXT:
            return self._apart._encode(text, split_special, before)
        with self._lock, clean_errors(f"'{self._file}' cannot encode this text", CHANGE_THE_TEXT):
            return self._engine.encode(text, split_special, before)


def _special_tokens(settings: TokenizerSettings) -> list[tuple[str, bool, bool, bool]]:
    """The tokens that the files beside the vocabulary call special, with their flags."""
    listed = {token.content: token for token in settings.tokens}
    tokens = (listed.get(text, SpecialToken(text, 0)) for text in sorted(settings.special_texts))
    return [(t.content, t.lstrip, t.rstrip, t.single_word) for t in tokens if t.content]


def _document(data: bytes, file: Path) -> dict[str, Any]:
    document = parse_json_object(
        data, f"'{file}'", max_bytes=MAX_VOCABULARY_BYTES, max_values=_MAX_VALUES
    )
    model = document.get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix"):
        raise UnsupportedModelError(
            f"[tokenizer] '{file}': the model must have no 'continuing_subword_prefix' but has one. "
            "Use a byte-level or SentencePiece vocabulary."
        )
    return document

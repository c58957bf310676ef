"""Vocabularies in SentencePiece's `tokenizer.model` format."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, set_min_log_level

from . import vocabulary
from .vocabulary import SPACE, Before, SpecialToken, SpecialTokens, TokenizerSettings

_ERRORS = 2
_WORDS = 3
"""The kind of models whose pieces are whole words."""
# of protobuf: how a field is written
_VARINT, _SIZED, _FIXED_BYTES = 0, 2, {1: 8, 5: 4}
# the last character for private use
_RARE = "\U0010fffd"
# the end of a piece: its score (2), and the type (3) of user-defined ones
_USER_DEFINED = re.compile(rb"\x15.{4}\x18\x04", re.DOTALL)
# a protobuf message after another one overrides its fields, here add_dummy_prefix (3) in
# normalizer_spec (3)
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceVocabulary:
    """The vocabulary of one `tokenizer.model`.

    Control symbols, the unknown token and the tokens that other files add are special. Where a text
    spells one, it becomes that token only if the caller says so. User-defined tokens are found in every
    text before the package sees it, as in transformers and llama.cpp, but for those that spell spaces as
    pieces do.

    Args:
        file: The file.
        settings: What the files beside it say.

    Raises:
        CheckpointError: The file is damaged.
    """

    parses_special = False
    utf8_errors = vocabulary.EACH_BYTE

    def __init__(self, file: Path, settings: TokenizerSettings) -> None:
        self._file = file
        self._model = vocabulary.read_limited(file, vocabulary.MAX_VOCABULARY_BYTES)
        self._processor = load_processor(self._model, file)
        self._size = self._processor.get_piece_size()
        with vocabulary.clean_errors(f"'{file}' is damaged: it has pieces that are not text"):
            for number in range(self._size):
                self._processor.id_to_piece(number)
        roles = {token.content for token in settings.roles}
        listed = {
            token.id: replace(token, special=token.special or token.content in roles)
            for token in (*settings.tokens, *self._new_roles(settings))
        }
        self._added = {number: t.content for number, t in listed.items() if number >= self._size}
        self._is_gguf = settings.is_gguf
        always: list[SpecialToken] = []
        if self._is_gguf:
            special = [token for token in listed.values() if token.special]
            always = [token for token in listed.values() if not token.special]
        else:
            with vocabulary.clean_errors(f"'{file}' is damaged: its pieces cannot be read"):
                always = user_defined_tokens(self._model)
            special = [
                listed.get(number, SpecialToken(self._processor.id_to_piece(number), number))
                for number in range(self._size)
                if self._processor.is_control(number) or self._processor.is_unknown(number)
            ]
            known = {token.id for token in (*special, *always)}
            others = [
                token
                for number, token in listed.items()
                if number >= self._size
                or (number not in known and self._processor.id_to_piece(number) == token.content)
            ]
            special += [token for token in others if token.special]
            always += [token for token in others if not token.special]
        self.special = SpecialTokens(special, longest_first=self._is_gguf)
        self._always_parsed = SpecialTokens(always, longest_first=True)
        self._parsed = SpecialTokens([*special, *always], longest_first=self._is_gguf)
        self.vocab_size = max(self._added, default=self._size - 1) + 1
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_token_id = bos if bos >= 0 else None
        self.eos_token_id = eos if eos >= 0 else None
        self.frame: tuple[list[int], list[int]] = ([bos] if bos >= 0 else [], [])
        self._spaced: tuple[Before, ...] = ("nothing",)
        if settings.add_prefix_space is False:
            self._spaced = ()
        elif settings.is_legacy or self._is_gguf:
            self._spaced = ("nothing", "special")
        self._strips_space = bool(self._spaced) and self._find_strips_space()

    def _new_roles(self, settings: TokenizerSettings) -> list[SpecialToken]:
        """The special tokens that only their names list. They get the ids after all others."""
        known = {token.content for token in settings.tokens}
        known |= {self._processor.id_to_piece(number) for number in range(self._size)}
        texts = dict.fromkeys(t.content for t in settings.roles if t.content not in known)
        roles = {token.content: token for token in settings.roles}
        first = max([self._size, *(token.id + 1 for token in settings.tokens)])
        return [replace(roles[text], id=first + n) for n, text in enumerate(texts)]

    def encode(
        self, text: str, before: Before = "nothing", *, parse_special: bool = False
    ) -> list[int]:
        """The ids of a text, in which special tokens that it spells may become those tokens."""
        parsed = self._parsed if parse_special else self._always_parsed
        return vocabulary.encode_split(self._encode, parsed.split(text), before)

    def _encode(self, text: str, before: Before) -> list[int]:
        takes_space = before in self._spaced
        if before == "special" and not self._is_gguf and text.startswith((" ", SPACE)):
            # so does transformers, and llama.cpp does not
            takes_space = False
        processor = self._processor if takes_space else self._later_processor
        with vocabulary.clean_errors(
            f"'{self._file}' cannot encode this text", vocabulary.CHANGE_THE_TEXT
        ):
            return list(processor.encode(text))

    def for_threads(self) -> "SentencePieceVocabulary":
        """The same vocabulary, since the package lets other threads run while it encodes."""
        return self

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without splitting it into pieces."""
        if self._longest is not None:
            return vocabulary.least_tokens(text, self._longest)
        # which of the two the text will be split by is not known
        return min(
            self._least_between(tokens, text) for tokens in (self._parsed, self._always_parsed)
        )

    def _least_between(self, tokens: SpecialTokens, text: str) -> int:
        """The number for a text that is split by some tokens, each of which counts as one."""
        parts = tokens.split(text)
        return sum(self._least.of(part) if isinstance(part, str) else 1 for part in parts)

    @cached_property
    def _least(self) -> "LeastPieces":
        # later texts have one space less than the first
        return LeastPieces(self._later_processor, self._model)

    @cached_property
    def _longest(self) -> int | None:
        """The most characters of a text, but spaces, that one token can stand for, if that is known."""
        sizes = [len(self._processor.id_to_piece(number)) for number in range(self._size)]
        byte_count = sum(self._processor.is_byte(number) for number in range(self._size))
        # without its bytes, any number of unknown characters would become one token
        has_bytes = byte_count == 256 and self._processor.is_byte(self._processor.encode(_RARE)[-1])
        if not has_bytes or _has_character_map(self._model):
            return None
        return max(*sizes, *map(len, self._parsed.ids))

    def id_to_piece(self, token_id: int) -> str:
        """The text of a token as the file spells it."""
        if 0 <= token_id < self._size:
            return str(self._processor.id_to_piece(token_id))
        return self._added[token_id]

    def token_id(self, piece: str) -> int | None:
        """The id of a token; `None` if there is none."""
        if piece in self._parsed.ids:
            return self._parsed.ids[piece]
        number = self._processor.piece_to_id(piece)
        return None if self._processor.is_unknown(number) else int(number)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text."""
        piece = self.id_to_piece(token_id)
        if token_id in self._parsed.id_set:
            return piece.encode()
        if self._processor.is_byte(token_id):
            return bytes.fromhex(piece[3:5])
        if at_start and self._strips_space:
            piece = piece.removeprefix(SPACE)
        return piece.replace(SPACE, " ").encode()

    @cached_property
    def _later_processor(self) -> SentencePieceProcessor:
        return load_processor(self._model + _NO_DUMMY_PREFIX, self._file)

    def _find_strips_space(self) -> bool:
        """Returns whether decoding drops the space that encoding puts before the text."""
        for number in range(self._size):
            piece = self._processor.id_to_piece(number)
            if piece.startswith(SPACE) and number not in self.special.id_set:
                return str(self._processor.decode([number])) != piece.replace(SPACE, " ")
        return False


def _has_character_map(model: bytes) -> bool:
    """Returns whether the normalizer (3) has a map of characters (2), which may also drop some."""
    return any(
        number == 2 and content
        for part, normalizer in _fields(model)
        if part == 3
        for number, content in _fields(normalizer)
    )


def user_defined_tokens(model: bytes) -> list[SpecialToken]:
    """The user-defined tokens in the content of a file, but those that spell a space as pieces do."""
    if _USER_DEFINED.search(model) is None:
        # large files take seconds to be read here
        return []
    pieces = (dict(_fields(piece)) for part, piece in _fields(model) if part == 1)
    texts = (str(piece[1], "utf-8", "replace") if piece.get(3) == 4 else "" for piece in pieces)
    return [
        SpecialToken(text, number, special=False)
        for number, text in enumerate(texts)
        if text and SPACE not in text
    ]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the texts, messages and numbers within a protobuf message, with their fields."""
    offset = 0
    while offset < len(message):
        tag, offset = _varint(message, offset)
        if tag & 7 == _SIZED:
            size, offset = _varint(message, offset)
            yield tag >> 3, message[offset : offset + size]
            offset += size
        elif tag & 7 == _VARINT:
            value, offset = _varint(message, offset)
            yield tag >> 3, value
        else:
            offset += _FIXED_BYTES[tag & 7]


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """The number that begins at an offset, and the offset after it."""
    number = shift = 0
    while True:
        byte = message[offset]
        number |= (byte & 127) << shift
        shift += 7
        offset += 1
        if byte < 128:
            return number, offset


class LeastPieces:
    """Counts how many pieces a text has at least, without splitting it.

    A piece stands for as many characters as the longest has, of those that are pieces by themselves. Any
    number of others may become one unknown piece.

    Args:
        processor: Knows the pieces.
        model: The content of its file.
    """

    def __init__(self, processor: SentencePieceProcessor, model: bytes) -> None:
        self._processor = processor
        numbers = range(processor.get_piece_size())
        pieces = {
            processor.id_to_piece(number)
            for number in numbers
            if not (processor.is_control(number) or processor.is_unused(number))
        }
        self._longest = max(map(len, pieces), default=1)
        # a model of whole words does not take a word apart
        is_split = _model_type(model) != _WORDS
        self._known = {piece for piece in pieces if len(piece) == 1} if is_split else set()

    def of(self, text: str) -> int:
        """The number for a text."""
        # which takes an eighth of the time that splitting takes
        text = self._processor.normalize(text)
        counts: Counter[str] = Counter()
        for start in range(0, len(text), vocabulary.STRETCH):
            counts.update(text[start : start + vocabulary.STRETCH])
        known = sum(count for character, count in counts.items() if character in self._known)
        return -(-known // self._longest)


def _model_type(model: bytes) -> int:
    """The kind of a model (3), which its trainer (2) has set; the usual one is 1."""
    types = [
        value
        for part, trainer in _fields(model)
        if part == 2
        for number, value in _fields(trainer)
        if number == 3
    ]
    return int(types[-1]) if types else 1


def load_processor(model: bytes, file: Path) -> SentencePieceProcessor:
    """The package's processor for the content of a file.

    Raises:
        CheckpointError: The file is damaged.
    """
    # remarks on odd pieces would go to standard error; errors are raised
    set_min_log_level(_ERRORS)
    processor = SentencePieceProcessor()
    with vocabulary.clean_errors(f"'{file}' is damaged or not a SentencePiece model"):
        processor.LoadFromSerializedProto(model)
    return processor

"""The tokenizer of an encoder-decoder: the tokens of a source and of a target.

Marian has a tokenizer of two languages: a SentencePiece model for each, and one list of tokens.
"""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError
from ..files.checkpoint_files import TRANSLATION_FILES
from ..files.reading import parse_json_object
from . import vocabulary
from .sentencepiece_model import LeastPieces, load_processor
from .tokenizer import Tokenizer

SOURCE_FILE, TARGET_FILE, LIST_FILE = TRANSLATION_FILES

_MAX_TOKENS = 2_000_000
_CODE = re.compile(r">>.*?<<", re.DOTALL)
_NAMES = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""The usual texts of the tokens with a role."""


class TranslationTokenizer:
    """Turns texts of one language into tokens, and tokens into texts of the other.

    A text may begin with the code of a language, such as `>>fra<<`, which is one token.

    Args:
        folder: Holds `source.spm`, `target.spm` and `vocab.json`.

    Attributes:
        folder: The folder.
        vocab_size: One more than the largest token id.
        eos_token_id: The token after the last.
        pad_token_id: The token of padding.

    Raises:
        CheckpointError: A file is missing or damaged, or the list lacks `</s>`, `<pad>` or `<unk>`, or
            what `tokenizer_config.json` names instead.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        files = [self.folder / name for name in (SOURCE_FILE, TARGET_FILE)]
        models = [vocabulary.read_limited(file, vocabulary.MAX_VOCABULARY_BYTES) for file in files]
        self._source, self._target = map(load_processor, models, files)
        self._source_model = models[0]
        settings = vocabulary.read_settings(self.folder)
        names = [settings.named.get(key, usual) for key, usual in _NAMES.items()]
        self._ids = self._listed(names)
        self._pieces = {number: piece for piece, number in self._ids.items()}
        self.vocab_size = max(self._pieces) + 1
        self.eos_token_id, self.pad_token_id, self._unknown = (self._ids[name] for name in names)
        texts = {*names, *(token.content for token in settings.special)}
        self._special = {self._ids[text] for text in texts if text in self._ids}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text of the first language, with the last; what the list lacks is `<unk>`.

        Raises:
            CheckpointError: The text cannot be encoded.
        """
        code = _CODE.match(text)
        if code is None:
            return self._encoded(self._source, SOURCE_FILE, text)
        first = self._ids.get(code.group(), self._unknown)
        return [first, *self._encoded(self._source, SOURCE_FILE, text[code.end() :])]

    def least_tokens(self, text: str) -> int:
        """The least number of tokens of a text, see `Tokenizer.least_tokens`."""
        code = _CODE.match(text)
        return self._least.of(text if code is None else text[code.end() :])

    @cached_property
    def _least(self) -> LeastPieces:
        with vocabulary.clean_errors(f"'{self.folder / SOURCE_FILE}' is damaged"):
            return LeastPieces(self._source, self._source_model)

    def encode_target(self, text: str) -> list[int]:
        """Like `encode`, for a text of the second language, which begins with no code."""
        return self._encoded(self._target, TARGET_FILE, text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens of the second language, without special tokens such as the last.

        Raises:
            ValueError: The list lacks one of the ids.
        """
        pieces: list[str] = []
        for number in ids:
            if number not in self._pieces:
                raise ValueError(
                    f"[Tokenizer] 'ids' must be tokens of '{self.folder / LIST_FILE}' but got {number}."
                )
            if number not in self._special:
                pieces.append(self._pieces[number])
        with vocabulary.clean_errors(f"'{self.folder / TARGET_FILE}' cannot decode these tokens"):
            text = str(self._target.decode_pieces(pieces)) if pieces else ""
        return text.replace(vocabulary.SPACE, " ").strip()

    def id_to_piece(self, token_id: int) -> str:
        """A token as the list spells it."""
        return self._pieces[token_id]

    def _encoded(self, processor: Any, file: str, text: str) -> list[int]:
        with vocabulary.clean_errors(
            f"'{self.folder / file}' cannot encode this text", vocabulary.CHANGE_THE_TEXT
        ):
            pieces = processor.encode(text, out_type=str)
        return [*(self._ids.get(piece, self._unknown) for piece in pieces), self.eos_token_id]

    def _listed(self, names: list[str]) -> dict[str, int]:
        file = self.folder / LIST_FILE
        data = vocabulary.read_limited(file, vocabulary.MAX_VOCABULARY_BYTES)
        listed: dict[str, Any] = parse_json_object(
            data, f"'{file}'", max_bytes=vocabulary.MAX_VOCABULARY_BYTES, max_values=_MAX_TOKENS
        )
        for piece, number in listed.items():
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
                raise CheckpointError(
                    f"[tokenizer] '{file}' must give each token a whole number from 0 but got "
                    f"{number!r:.80} for {piece!r:.80}."
                )
        missing = [name for name in names if name not in listed]
        if missing:
            raise CheckpointError(
                f"[tokenizer] '{file}' must list {', '.join(missing)} but does not."
            )
        return listed


class PairTokenizer(Protocol):
    """Turns texts of one kind into tokens, and tokens into texts of the other."""

    vocab_size: int
    eos_token_id: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a source, with the last."""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it."""

    def encode_target(self, text: str) -> list[int]:
        """The tokens of a target, with the last."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens of a target."""

    def id_to_piece(self, token_id: int) -> str:
        """A token as the files spell it."""


class SharedVocabulary:
    """One vocabulary for sources and targets.

    Args:
        tokenizer: Names a token that ends a text.

    Raises:
        CheckpointError: It does not.
    """

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.eos_token_id is None:
            raise CheckpointError(
                f"[tokenizer] '{tokenizer.folder}' must name a token that ends a text, 'eos_token', but "
                "names none. Name one in 'tokenizer_config.json'."
            )
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.eos_token_id = tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the last."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self.eos_token_id]

    encode_target = encode

    def least_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, found without encoding it."""
        return self._tokenizer.least_tokens(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, without special ones."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def id_to_piece(self, token_id: int) -> str:
        """A token as the files spell it."""
        return self._tokenizer.id_to_piece(token_id)


def open_translation_tokenizer(folder: Path | str) -> PairTokenizer:
    """Reads the tokenizer of an encoder-decoder: one of two languages, or one for both.

    Raises:
        CheckpointError: A file is missing or damaged, or no token ends a text.
    """
    if (Path(folder) / TRANSLATION_FILES[0]).exists():
        return TranslationTokenizer(folder)
    return SharedVocabulary(Tokenizer.from_folder(folder))

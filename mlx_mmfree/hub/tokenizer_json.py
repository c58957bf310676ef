"""Vocabularies in the `tokenizer.json` format, through the package `tokenizers`."""

import json
import re
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from ..errors import CheckpointError, UnsupportedModelError
from .compiled_code import clean_errors, silent_stderr
from .piece_decoder import PieceDecoder
from .special_tokens import SpecialToken, SpecialTokens
from .tokenizer_files import MAX_VOCABULARY_BYTES, TokenizerSettings, read_limited

_WORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*(?!null|""|\s)')


class JsonVocabulary:
    """One `tokenizer.json`.

    Args:
        file: the file.
        settings: what the files beside it say.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedModelError: it asks for something that is not supported.
    """

    parses_special = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, file: Path, settings: TokenizerSettings) -> None:
        self._file = file
        self._lock = Lock()
        data = read_limited(file, MAX_VOCABULARY_BYTES)
        # the package aborts the process on some files that have one
        if _WORD_PREFIX.search(data):
            raise UnsupportedModelError(
                f"'{file}': the model must have no 'continuing_subword_prefix' but has one. "
                "Use a byte-level or SentencePiece vocabulary."
            )
        problem = f"'{file}' is damaged or no tokenizer.json. Download it again"
        with silent_stderr(), clean_errors(problem):
            self._tokenizer = Tokenizer.from_buffer(data)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._mark_special(settings)
            self._ids = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
            self.frame = self._find_frame()
            decode = PieceDecoder(_state(self._tokenizer.decoder), file)
            pre_tokenizer = _state(self._tokenizer.pre_tokenizer)
        self._decode = decode
        self.utf8_errors = decode.utf8_errors
        self._later = _without_first_prefix(pre_tokenizer)
        self.vocab_size = max(self._ids, default=-1) + 1
        self.special = SpecialTokens(
            SpecialToken(token.content, number, True, token.lstrip, token.rstrip, token.single_word)
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        if not self._ids:
            raise CheckpointError(f"'{file}' holds no tokens. Download it again.")

    def encode_parsed(self, text: str) -> list[int]:
        """The ids of a text whose special-token spellings count."""
        return self._encode(text, split_special=False)

    def encode_plain(self, text: str, at_start: bool = True) -> list[int]:
        """The ids of a text as plain text; ``at_start`` is False after a special token."""
        if at_start or self._later is None:
            return self._encode(text, split_special=True)
        return self._encode(text, split_special=True, pre_tokenizer=self._later)

    def piece(self, token_id: int) -> str:
        """The text of a token as the file spells it."""
        piece = self._tokenizer.id_to_token(token_id) if token_id in self._ids else None
        if piece is None:
            raise KeyError(token_id)
        return str(piece)

    def token_id(self, piece: str) -> int | None:
        """The id of a token, None if there is none."""
        number = self._tokenizer.token_to_id(piece)
        return None if number is None else int(number)

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text."""
        return self._decode(self.piece(token_id), at_start)

    def _mark_special(self, settings: TokenizerSettings) -> None:
        listed = {token.content: token for token in settings.tokens}
        known = self._tokenizer.get_added_tokens_decoder().values()
        marked = {token.content for token in known if token.special}
        for text in sorted(settings.special_texts - marked):
            if text and self._tokenizer.token_to_id(text) is not None:
                token = listed.get(text, SpecialToken(text, 0))
                flags = {"lstrip": token.lstrip, "rstrip": token.rstrip}
                self._tokenizer.add_special_tokens(
                    [AddedToken(text, single_word=token.single_word, normalized=False, **flags)]
                )

    def _find_frame(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before and after a text."""
        framed = self._tokenizer.encode("a", add_special_tokens=True).ids
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        raise ValueError("the post-processor changes the tokens of the text")

    def _encode(self, text: str, *, split_special: bool, pre_tokenizer: Any = None) -> list[int]:
        # the switches below belong to the shared object
        with self._lock, clean_errors(f"'{self._file}' cannot encode this text"):
            usual = self._tokenizer.pre_tokenizer
            self._tokenizer.encode_special_tokens = split_special
            if pre_tokenizer is not None:
                self._tokenizer.pre_tokenizer = pre_tokenizer
            try:
                return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
            finally:
                if pre_tokenizer is not None:
                    self._tokenizer.pre_tokenizer = usual


def _state(part: Any) -> dict[str, Any] | None:
    """A part of the tokenizer as its section of the file."""
    if part is None:
        return None
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else None


def _without_first_prefix(state: dict[str, Any] | None) -> Any:
    """The pre-tokenizer for text after a special token; None where it is the usual one."""

    def change(part: Any) -> Any:
        if isinstance(part, list):
            return [change(entry) for entry in part]
        if not isinstance(part, dict):
            return part
        changed = {key: change(entry) for key, entry in part.items()}
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            changed["prepend_scheme"] = "never"
        return changed

    later = change(state)
    if later == state:
        return None
    pre_tokenizer = pre_tokenizers.Sequence([])
    pre_tokenizer.__setstate__(json.dumps(later).encode())
    return pre_tokenizer

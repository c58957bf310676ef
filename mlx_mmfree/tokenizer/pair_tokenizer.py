"""What an encoder-decoder needs of a tokenizer: the tokens of a source and of a target."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..errors import CheckpointError
from ..files.checkpoint_files import TRANSLATION_FILES
from .tokenizer import Tokenizer
from .translation_tokenizer import TranslationTokenizer


class PairTokenizer(Protocol):
    """Turns texts of one kind into tokens, and tokens into texts of the other."""

    vocab_size: int
    eos_token_id: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a source, with the last."""

    def encode_target(self, text: str) -> list[int]:
        """The tokens of a target, with the last."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens of a target."""

    def piece(self, token_id: int) -> str:
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

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, without special ones."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, token_id: int) -> str:
        """A token as the files spell it."""
        return self._tokenizer.piece(token_id)


def open_pair_tokenizer(folder: Path | str) -> PairTokenizer:
    """Reads the tokenizer of an encoder-decoder: one of two languages, or one for both.

    Raises:
        CheckpointError: A file is missing or damaged, or no token ends a text.
    """
    if (Path(folder) / TRANSLATION_FILES[0]).exists():
        return TranslationTokenizer(folder)
    return SharedVocabulary(Tokenizer.from_folder(folder))

"""What the tokenizer asks of a vocabulary, whatever its file format, and ids that it has not."""

import operator
from collections.abc import Callable, Iterable
from typing import Protocol

from .detokenizer import TokenSource
from .special_tokens import Before, SpecialTokens


def encode_split(
    encode: Callable[[str, Before], list[int]],
    parts: Iterable[str | int],
    before: Before = "nothing",
) -> list[int]:
    """The ids of a text that was split into ids of tokens and texts between them.

    Args:
        encode: Gives the ids of a text after what is said to stand before it.
        parts: The ids and texts.
        before: What stands before the first.
    """
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            before = "special"
        else:
            ids += encode(part, before)
            before = "text"
    return ids


class Vocabulary(TokenSource, Protocol):
    """A vocabulary.

    Attributes:
        vocab_size: One more than the largest token id.
        bos_token_id: The token that begins a text, as the vocabulary says; `None` if it names none.
        eos_token_id: The token that ends a text, as the vocabulary says; `None` if it names none.
        frame: The ids that the vocabulary puts before and after every text.
        longest: The most characters of a text, but spaces, that one token can stand for; `None` if that
            is not known.
        parses_special: Whether a special token that a text spells usually becomes that token.
        special: The special tokens.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    frame: tuple[list[int], list[int]]
    parses_special: bool
    special: SpecialTokens

    @property
    def longest(self) -> int | None: ...

    def encode_parsed(self, text: str, before: Before = "nothing") -> list[int]: ...

    def encode_plain(self, text: str, before: Before = "nothing") -> list[int]: ...

    def for_threads(self) -> "Vocabulary": ...

    def piece(self, token_id: int) -> str: ...

    def token_id(self, piece: str) -> int | None: ...


class CheckedSource:
    """Gives the bytes of a vocabulary's tokens, and explains ids that the vocabulary lacks.

    Args:
        vocabulary: The vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known: dict[int, bytes] = {}
        self.utf8_errors = vocabulary.utf8_errors

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
            ValueError: The vocabulary has no such token.
        """
        if not at_start and token_id in self._known:
            return self._known[token_id]
        raw = self._vocabulary.token_bytes(checked_id(self._vocabulary, token_id), at_start)
        if not at_start:
            self._known[token_id] = raw
        return raw


def has_token(vocabulary: Vocabulary, token_id: int | None) -> bool:
    """Whether the vocabulary has a token."""
    try:
        return token_id is not None and vocabulary.piece(token_id) is not None
    except KeyError:
        return False


def checked_id(vocabulary: Vocabulary, token_id: int) -> int:
    """A token id as a plain number.

    Raises:
        TypeError: The id is not a whole number.
        ValueError: The vocabulary has no such token.
    """
    try:
        number = operator.index(token_id)
    except TypeError as error:
        raise TypeError(
            f"[Tokenizer] 'ids' must be whole numbers in one list but got {type(token_id).__name__}. "
            "Decode the lists of a batch one by one."
        ) from error
    if not has_token(vocabulary, number):
        raise ValueError(
            f"[Tokenizer] 'ids' must be token ids below {vocabulary.vocab_size} that the "
            f"vocabulary has but got {number}. Use the tokenizer that belongs to the ids."
        )
    return number

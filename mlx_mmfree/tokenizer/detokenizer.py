"""Token ids to text, one token at a time."""

import codecs
from typing import Protocol


class TokenSource(Protocol):
    """What the detokenizer asks of a vocabulary."""

    utf8_errors: str

    def token_bytes(self, token_id: int, at_start: bool) -> bytes:
        """The bytes that a token adds to the text; `at_start` says that no text precedes it."""
        ...


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


EACH_BYTE = "mlx_mmfree.each_byte"
codecs.register_error(EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """Turns a stream of token ids into text, and never splits a character.

    All calls together give the text of `Tokenizer.decode`. Bytes that do not form a whole character yet
    are held back until the next token or `finalize`. Text that was given out never changes. The work per
    token does not grow with the length of the text.

    Args:
        source: The vocabulary.
        skipped: The ids that add nothing to the text.
        at_start: Whether no text stands before the first token, so that a space that the vocabulary puts
            before every text is left out.

    Example:
        >>> detokenizer = tokenizer.detokenizer()  # doctest: +SKIP
        >>> for token_id in ids:  # doctest: +SKIP
        ...     print(detokenizer.add(token_id), end="", flush=True)
        >>> print(detokenizer.finalize())  # doctest: +SKIP
    """

    def __init__(
        self, source: TokenSource, skipped: frozenset[int] = frozenset(), *, at_start: bool = True
    ) -> None:
        self._source = source
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(source.utf8_errors)
        self._starts = self._at_start = at_start

    def add(self, token_id: int) -> str:
        """Takes one token and returns the new text, which may be empty.

        Args:
            token_id: An id of the vocabulary.

        Raises:
            ValueError: The vocabulary has no such id.
        """
        raw = self._source.token_bytes(token_id, self._at_start)
        if token_id in self._skipped:
            return ""
        self._at_start = False
        return self._decoder.decode(raw)

    def finalize(self) -> str:
        """Returns what was held back and makes the object ready for the next text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = self._starts
        return rest

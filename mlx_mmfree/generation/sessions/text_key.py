"""Names texts by a digest of their tokens."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...models.parts.tokens import check_tokens

BYTES_PER_TOKEN = 4


class TextKey(NamedTuple):
    """Names a text read by one model.

    Attributes:
        digest: SHA-256 of the model's identity and the tokens, as `int32` of little-endian bytes. No two
            texts with the same one can be found on purpose.
        length: How many tokens there are.
    """

    digest: bytes
    length: int


def token_bytes(tokens: Sequence[int], vocab_size: int) -> bytes:
    """The tokens as they are digested.

    Raises:
        ValueError: One is no whole number within `[0, vocab_size)`.
    """
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < vocab_size):
        # much slower, and says what is wrong
        check_tokens(tokens, vocab_size)
    return ids.astype("<i4").tobytes()


def keys_of_beginnings(identity: bytes, tokens: bytes, counts: Iterable[int]) -> Iterator[TextKey]:
    """The keys of beginnings of a text; each token is digested once.

    Args:
        identity: That of the model.
        tokens: As `token_bytes` gives them.
        counts: The lengths of the beginnings, ascending and none longer than the text.
    """
    digest = hashlib.sha256(identity)
    start = 0
    for count in counts:
        stop = count * BYTES_PER_TOKEN
        digest.update(tokens[start:stop])
        yield TextKey(digest.copy().digest(), count)
        start = stop


def key_of(identity: bytes, tokens: bytes) -> TextKey:
    """The key of a whole text."""
    (key,) = keys_of_beginnings(identity, tokens, [len(tokens) // BYTES_PER_TOKEN])
    return key

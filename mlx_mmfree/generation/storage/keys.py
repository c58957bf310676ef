"""Names of texts that one model has read."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...models.parts.token_checks import check_tokens

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


def key_of(identity: bytes, tokens: bytes) -> TextKey:
    """The key of a text, of which `token_bytes` gives the tokens, for a model of this identity."""
    return TextKey(hashlib.sha256(identity + tokens).digest(), len(tokens) // BYTES_PER_TOKEN)

"""The bytes of tokens, of which a model may know more than its tokenizer."""

from typing import Any


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes that a token adds to a text; `None` if the tokenizer has no such token."""
    try:
        raw: bytes = tokenizer.token_bytes(token)
    except ValueError:
        return None
    return raw

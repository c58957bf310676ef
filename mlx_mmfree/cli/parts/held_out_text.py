"""The text on which a command measures a model: read from a file and encoded."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...files.opening import read_text as read_utf8

if TYPE_CHECKING:
    import numpy as np

    from ...hub import Tokenizer

# for each byte of text, a tokenizer may need over a hundred bytes of memory
_MAX_BYTES = 32_000_000


def read_text(file: Path, place: str) -> str:
    """Reads a text file.

    Args:
        file: The file.
        place: The command in brackets and the argument that names the file in quotes.

    Raises:
        UsageError: The file cannot be read, is too large, or is not UTF-8.
    """
    try:
        return read_utf8(file, _MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"{place} must be a UTF-8 text file but '{file}' cannot be read: {error}."
        ) from error


def text_tokens(
    tokenizer: "Tokenizer", text: str, vocab_size: int, place: str, limit: int | None = None
) -> "tuple[np.ndarray, int]":
    """The token ids of a text, and the number of UTF-8 bytes that they predict.

    The ids begin with the tokenizer's first token, if it has one. Without one, the first token of the
    text is not predicted, and its bytes do not count.

    Args:
        tokenizer: The tokenizer of the model.
        text: The text. Special tokens in it count as plain text.
        vocab_size: The size of the model's vocabulary.
        place: The command in brackets and the argument that gave the text in quotes.
        limit: The largest number of ids to return; `None` returns all.

    Raises:
        UsageError: The text has fewer than two tokens.
        ValueError: A token is outside the model's vocabulary.
    """
    import numpy as np

    from ...models.parts.tokens import check_tokens

    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    frame = tokenizer.encode("")[:1]
    begins = frame == [tokenizer.bos_token_id]
    ids = [*frame, *plain] if begins else plain
    is_whole = limit is None or limit >= len(ids)
    ids = ids[:limit]
    check_tokens(ids, vocab_size)
    if len(ids) < 2:
        raise UsageError(
            f"{place} must hold at least two tokens but holds {len(plain)}. Give a longer text."
        )
    predicted = text if is_whole and begins else tokenizer.decode(ids[1:])
    return np.array(ids, np.int32), len(predicted.encode())

"""The text on which a command measures a model: read from a file and encoded."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...files.reading import decode_text, read_file
from ...training.corpus.documents import COMPRESSED, END_OF_TEXT, read_chunks

if TYPE_CHECKING:
    import numpy as np

    from ...hub import Tokenizer

# for each byte of text, a tokenizer may need over a hundred bytes of memory
_MAX_BYTES = 32_000_000


def read_text(file: Path, argument: str) -> str:
    """Reads a text file, which may be compressed with `.gz` or `.xz`.

    Args:
        file: The file.
        argument: The command in brackets and the argument that names the file in quotes.

    Raises:
        UsageError: The file cannot be read, is too large, or is not UTF-8.
        TrainingError: A compressed file cannot be read, or grows to far too much.
    """
    try:
        return decode_text(_content(file))
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else f"it {error}"
        raise UsageError(
            f"{argument} must be a UTF-8 text file but '{file}' cannot be read: {reason}."
        ) from error


def _content(file: Path) -> bytes:
    if file.suffix not in COMPRESSED:
        return read_file(file, _MAX_BYTES)
    data = bytearray()
    for chunk in read_chunks(file):
        data += chunk
        if len(data) > _MAX_BYTES:
            raise OSError(f"it holds more than the {_MAX_BYTES:,} bytes that such a file may have")
    return bytes(data)


def text_tokens(
    tokenizer: "Tokenizer", text: str, vocab_size: int, argument: str, limit: int | None = None
) -> "tuple[np.ndarray, int]":
    """The token ids of a text, and the number of UTF-8 bytes that they predict.

    Documents that end with `<|endoftext|>` are encoded as for training: one by one without the line
    breaks around them, each followed by the token that ends it. Its bytes do not count.

    The ids begin with the tokenizer's first token, if it has one. Without one, the first token of the
    text is not predicted, and its bytes do not count.

    Args:
        tokenizer: The tokenizer of the model.
        text: The text. Other special tokens in it count as plain text.
        vocab_size: The size of the model's vocabulary.
        argument: The command in brackets and the argument that gave the text in quotes.
        limit: The largest number of ids to return; `None` returns all.

    Raises:
        UsageError: The text has fewer than two tokens.
        TrainingError: It has several documents, and the tokenizer has no token that ends one.
        ValueError: A token is outside the model's vocabulary.
    """
    import numpy as np

    from ...models.parts.token_checks import check_tokens
    from ...training.corpus.tokenize import end_of_text

    documents, end = [text], list[int]()
    if END_OF_TEXT in text:
        documents = [part for part in map(_stripped, text.split(END_OF_TEXT)) if part]
        end = [end_of_text(tokenizer)]
    frame = tokenizer.encode("")[:1]
    ids = frame if frame == [tokenizer.bos_token_id] else []
    size_bytes = 0
    for document in documents:
        part = tokenizer.encode(document, add_special_tokens=False, parse_special=False)
        used = part if limit is None else part[: limit - len(ids)]
        first = 0 if ids else 1
        is_whole = first == 0 and len(used) == len(part)
        predicted = document if is_whole else tokenizer.decode(used[first:])
        size_bytes += len(predicted.encode())
        ids += used + end
        if limit is not None and len(ids) >= limit:
            ids = ids[:limit]
            break
    check_tokens(ids, vocab_size)
    if len(ids) < 2:
        raise UsageError(
            f"{argument} must hold at least two tokens but holds {len(ids)}. Give a longer text."
        )
    return np.array(ids, np.int32), size_bytes


def _stripped(document: str) -> str:
    return document.strip("\n")

"""The documents of one file, in order and one at a time."""

import codecs
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from ...errors import TrainingError
from ...files.reading import check_not_utf16, parse_json
from .parquet import parquet_documents
from .pieces import COMPRESSED, OnBytes, read_pieces, unreadable

END_OF_TEXT = "<|endoftext|>"
TEXT_COLUMN = "text"
MAX_CHARACTERS = 16_000_000
"""Longer texts are cut, since a tokenizer needs over a hundred bytes of memory for some of them."""

MAX_LINE_BYTES = 4 * MAX_CHARACTERS
_JSON_LINES, _PARQUET = ".jsonl", ".parquet"
FORMATS = (".txt", _JSON_LINES, _PARQUET)


def file_format(name: str) -> str:
    """The one of `FORMATS` that a file's name asks for; an unknown suffix is taken for text."""
    plain = name
    for suffix in COMPRESSED:
        plain = plain.removesuffix(suffix)
    return next((known for known in FORMATS if plain.endswith(known)), FORMATS[0])


def read_documents(
    path: Path, column: str = TEXT_COLUMN, on_bytes: OnBytes | None = None
) -> Iterator[str]:
    r"""The documents of a file.

    A text file holds documents separated by `<|endoftext|>`; line breaks around them do not count. JSON
    lines and parquet have one in each line or row. Both kinds of text may be compressed. Documents that
    are empty or null are left out. One of over 16 million characters is cut into several at line breaks.

    Args:
        path: The file, `.jsonl`, `.parquet` or, with any other suffix, text.
        column: The key or column of the text in JSON lines and parquet.
        on_bytes: Is told of the bytes that have been read.

    Raises:
        TrainingError: The file cannot be read, or does not hold what its name promises.
    """
    kind = file_format(path.name)
    if kind == _PARQUET:
        documents = parquet_documents(path, column, MAX_LINE_BYTES, on_bytes)
    elif kind == _JSON_LINES:
        documents = _documents_of_lines(path, column, on_bytes)
    else:
        documents = _documents_of_text(path, on_bytes)
    for document in documents:
        yield from _cut(document)


def _documents_of_text(path: Path, on_bytes: OnBytes | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    pieces = read_pieces(path, on_bytes)
    first = next(pieces, b"")
    try:
        check_not_utf16(first)
    except ValueError as error:
        raise TrainingError(f"[data] '{path}' {error}.") from error
    for piece in chain((first,), pieces, (b"",)):
        try:
            rest += decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise unreadable(path, error) from error
        *whole, rest = rest.split(END_OF_TEXT)
        if len(rest) > MAX_CHARACTERS + len(END_OF_TEXT):
            at = _cutting_point(rest)
            whole, rest = [*whole, rest[:at]], rest[at:]
        for document in whole:
            yield document.strip("\n")
    yield rest.strip("\n")


def _documents_of_lines(path: Path, column: str, on_bytes: OnBytes | None) -> Iterator[str]:
    rest, number = b"", 0
    for piece in chain(read_pieces(path, on_bytes), (b"\n",)):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise TrainingError(
                f"[data] '{path}' line {number + len(lines) + 1}: it must have at most "
                f"{MAX_LINE_BYTES:,} bytes but has more. Split it into several documents."
            )
        for line in lines:
            number += 1
            if line.strip():
                yield _text_of_line(line, column, f"'{path}' line {number}")


def _text_of_line(line: bytes, column: str, place: str) -> str:
    try:
        # columns that are not read may hold NaN
        value = parse_json(line, max_bytes=MAX_LINE_BYTES, finite=False)
    except ValueError as error:
        raise TrainingError(f"[data] {place}: it {error}.") from error
    if not isinstance(value, dict):
        raise TrainingError(
            f"[data] {place}: it must be a JSON object but is {type(value).__name__}."
        )
    text = value.get(column)
    if column in value and text is None:
        return ""
    if not isinstance(text, str):
        keys = ", ".join(f"'{key:.40}'" for key in list(value)[:8]) or "none"
        raise TrainingError(
            f"[data] {place}: 'text_column' must name a key with a text but {column!r:.60} does not. "
            f"The keys are {keys}."
        )
    return text


def _cut(document: str) -> Iterator[str]:
    while len(document) > MAX_CHARACTERS:
        at = _cutting_point(document)
        if part := document[:at].strip("\n"):
            yield part
        document = document[at:].strip("\n")
    if document:
        yield document


def _cutting_point(text: str) -> int:
    """Behind the last line break within the limit, or at the limit if there is none."""
    return text.rfind("\n", 1, MAX_CHARACTERS) + 1 or MAX_CHARACTERS

"""The documents of files of texts: lines of JSON, rows of parquet files, or plain texts."""

import codecs
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from ...errors import TrainingError, install_extra
from ...files.reading import check_not_utf16, open_file, parse_json
from ...platform.confinement.policy import PARQUET_PART
from ...platform.confinement.process import LimitError

OnBytes = Callable[[int], object]
"""Is called with the number of further bytes of a file, as it lies on the disk, that have been read."""

# text compresses to about a third of its size, and repeated lines to less
_MOST_TIMES_LARGER = 100
_SMALL_BYTES = 1_000_000
_CHUNK_BYTES = 1_000_000

_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".xz": lzma.open,
}
COMPRESSED = tuple(_UNPACKERS)
"""The suffixes of compressed files."""


class Growth:
    """Refuses a file that holds far more text than it has bytes.

    Args:
        path: The file.
        kind: What it must hold, for the message.
        size_bytes: Its size on the disk.
    """

    def __init__(self, path: Path, kind: str, size_bytes: int):
        self._path, self._kind = path, kind
        self._most = self._left = _SMALL_BYTES + _MOST_TIMES_LARGER * size_bytes

    def add(self, size_bytes: int) -> None:
        """Tells of so many further bytes of text.

        Raises:
            TrainingError: They are too many.
        """
        self._left -= size_bytes
        if self._left < 0:
            raise TrainingError(
                f"[data] '{self._path}' must hold {self._kind}, which grows at most "
                f"{_MOST_TIMES_LARGER} times, but it grows to over {self._most:,} bytes. If you trust "
                "the file, write it as plain text."
            )


def read_chunks(path: Path, on_bytes: OnBytes | None = None) -> Iterator[bytes]:
    """The content of a file in order, decompressed if its suffix is one of `COMPRESSED`.

    Raises:
        TrainingError: The file cannot be read, or decompresses to far too much.
    """
    try:
        with open_file(path) as stream:
            unpack = _UNPACKERS.get(path.suffix)
            growth = Growth(path, "compressed text", os.fstat(stream.fileno()).st_size)
            source = stream if unpack is None else unpack(stream)
            done = 0
            while chunk := source.read(_CHUNK_BYTES):
                if unpack is not None:
                    growth.add(len(chunk))
                yield chunk
                if on_bytes is not None:
                    on_bytes(stream.tell() - done)
                    done = stream.tell()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> TrainingError:
    """The error for a file that does not hold what its name promises."""
    return TrainingError(f"[data] '{path}' must be a readable UTF-8 text file: {error}.")


def parquet_documents(
    path: Path, column: str | None, most_bytes: int, on_bytes: OnBytes | None = None
) -> Iterator[str]:
    """The texts of one column in order, or whole rows as JSON. Rows without a text are left out.

    A few bytes of such a file can stand for any number, and pyarrow takes the memory for them first. So
    it runs in a process with limits.

    Args:
        path: The file.
        column: The column; `None`: all of them.
        most_bytes: The most that a text may have.
        on_bytes: Is called with the number of bytes that have been read.

    Raises:
        TrainingError: pyarrow is missing, the file is damaged or holds far too much, or the column does
            not hold texts.
    """
    if find_spec("pyarrow") is None:
        raise TrainingError(
            f"[data] '{path}' is a parquet file, for which pyarrow is needed, but it is not installed. "
            + install_extra("parquet")
        )
    process = None
    try:
        size = path.stat().st_size
        process = PARQUET_PART.process(size)
        found = process.ask((str(path.absolute()), column, most_bytes), PARQUET_PART.seconds)
        if column is not None:
            _check_column(found["columns"], found["holds_texts"], column, path)
        # what the file says of itself, before anything is decompressed, and then what there is
        Growth(path, "text", size).add(found["size_bytes"])
        growth = Growth(path, "text", size)
        rows, read = max(found["rows"], 1), 0
        while (part := process.ask(None, PARQUET_PART.seconds))["rows"]:
            growth.add(part["size_bytes"])
            yield from part["texts"]
            if on_bytes is not None:
                on_bytes((read + part["rows"]) * size // rows - read * size // rows)
            read += part["rows"]
    except (OSError, LimitError) as error:
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"[data] '{path}' must be a readable parquet file: {reason:.300}"
        ) from error
    finally:
        if process is not None:
            process.close()


def _check_column(columns: list[str], holds_texts: bool, column: str, path: Path) -> None:
    if not holds_texts:
        names = ", ".join(f"'{name:.40}'" for name in columns[:8]) or "none"
        raise TrainingError(
            f"[data] '{path}': 'text_column' must name a column of texts but {column!r:.60} does not. "
            f"The columns are {names}."
        )


END_OF_TEXT = "<|endoftext|>"
TEXT_COLUMN = "text"
MAX_CHARACTERS = 16_000_000
"""Longer texts are cut, since a tokenizer needs over a hundred bytes of memory for some of them."""

MAX_LINE_BYTES = 4 * MAX_CHARACTERS
JSON_LINES, PARQUET = ".jsonl", ".parquet"
FORMATS = (".txt", JSON_LINES, PARQUET)


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
        on_bytes: Is called with the number of bytes that have been read.

    Raises:
        TrainingError: The file cannot be read, or does not hold what its name promises.
    """
    kind = file_format(path.name)
    if kind == PARQUET:
        documents = parquet_documents(path, column, MAX_LINE_BYTES, on_bytes)
    elif kind == JSON_LINES:
        documents = _documents_of_lines(path, column, on_bytes)
    else:
        documents = _documents_of_text(path, on_bytes)
    for document in documents:
        yield from _cut(document)


def _documents_of_text(path: Path, on_bytes: OnBytes | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    chunks = read_chunks(path, on_bytes)
    first = next(chunks, b"")
    try:
        check_not_utf16(first)
    except ValueError as error:
        raise TrainingError(f"[data] '{path}' {error}.") from error
    for chunk in chain((first,), chunks, (b"",)):
        try:
            rest += decoder.decode(chunk, final=not chunk)
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
    for number, line in read_lines(path, MAX_LINE_BYTES, on_bytes):
        yield _text_of_line(line, column, f"'{path}' line {number}")


def read_lines(
    path: Path, most_bytes: int, on_bytes: OnBytes | None = None, *, keeps_empty: bool = False
) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, which may be compressed, and their numbers from 1.

    Args:
        path: The file.
        most_bytes: The most that a line may have.
        on_bytes: Is called with the number of bytes that have been read.
        keeps_empty: Whether lines without text come too.

    Raises:
        TrainingError: The file cannot be read, or a line is too long.
    """
    rest, number = b"", 0
    for chunk in chain(read_chunks(path, on_bytes), (b"\n",)):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if len(line) > most_bytes:
                raise _long_line(path, number, most_bytes)
            if keeps_empty or line.strip():
                yield number, line
        if len(rest) > most_bytes:
            raise _long_line(path, number + 1, most_bytes)


def _long_line(path: Path, number: int, most_bytes: int) -> TrainingError:
    return TrainingError(
        f"[data] '{path}' line {number}: it must have at most {most_bytes:,} bytes but has more. Split "
        "it into several."
    )


def _text_of_line(line: bytes, column: str, where: str) -> str:
    try:
        # columns that are not read may hold NaN
        value = parse_json(line, max_bytes=MAX_LINE_BYTES, finite=False)
    except ValueError as error:
        raise TrainingError(f"[data] {where}: it {error}.") from error
    if not isinstance(value, dict):
        raise TrainingError(
            f"[data] {where}: it must be a JSON object but is {type(value).__name__}."
        )
    text = value.get(column)
    if column in value and text is None:
        return ""
    if not isinstance(text, str):
        keys = ", ".join(f"'{key:.40}'" for key in list(value)[:8]) or "none"
        raise TrainingError(
            f"[data] {where}: 'text_column' must name a key with a text but {column!r:.60} does not. "
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
    """After the last line break within the limit, or at the limit if there is none."""
    return text.rfind("\n", 1, MAX_CHARACTERS) + 1 or MAX_CHARACTERS

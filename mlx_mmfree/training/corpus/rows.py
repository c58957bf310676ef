"""The rows of a data file as objects: JSON lines, lists of JSON, tables, parquet and texts."""

import codecs
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ...arguments import did_you_mean
from ...errors import MMFreeError, TrainingError
from ...files.reading import check_not_utf16, decode_text, parse_json
from .documents import (
    COMPRESSED,
    JSON_LINES,
    PARQUET,
    OnBytes,
    parquet_documents,
    read_chunks,
    read_documents,
    read_lines,
)

MAX_ROW_BYTES = 4_000_000
MAX_LIST_BYTES = 512_000_000
MAX_COLUMNS = 1_000

_JSON, _CSV, _TSV = ".json", ".csv", ".tsv"
TEXTS = (".txt", ".md")
"""The suffixes of files that are texts."""

KINDS = (JSON_LINES, _JSON, _CSV, _TSV, PARQUET)
"""The suffixes of files that hold rows; each may be followed by one of `COMPRESSED`."""

Result = TypeVar("Result")


class RowError(Exception):
    """The error of a row."""


def kind_of_file(path: Path) -> str:
    """The suffix that says what a file holds, without the suffix of its compression."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_rows(
    path: Path,
    encode: Callable[[dict[str, Any]], Result],
    columns: Sequence[str] = (),
    *,
    text_key: str = "text",
    on_bytes: OnBytes | None = None,
) -> Iterator[Result]:
    """The result of `encode` for each row of a file, which may be compressed with `.gz` or `.xz`.

    Rows are the lines of `.jsonl`, the objects of `.json` (a list of them, or one after another), the
    rows of `.parquet` and the rows of tables. A table, `.csv` or `.tsv`, names its columns in its first
    row. Its fields are separated by tabs, or in `.csv` by commas, semicolons or tabs, and may be
    quoted. A `.txt` or `.md` is a text, or several with `<|endoftext|>` between them.

    Args:
        path: The file.
        encode: Is given a row by its keys. It may raise `RowError`.
        columns: Names of the first columns of a `.tsv`, which has no row of names then.
        text_key: The key of a text.
        on_bytes: Is called with the number of bytes that have been read, as they lie on the disk.

    Raises:
        TrainingError: A row cannot be used. The message names the file, and the line, row or entry.
    """
    kind = kind_of_file(path)
    if kind in TEXTS:
        rows = _text_rows(path, text_key, on_bytes)
    elif kind == PARQUET:
        rows = _parquet_rows(path, on_bytes)
    elif kind == _TSV and columns:
        rows = _bare_rows(path, columns, on_bytes)
    elif kind in (_CSV, _TSV):
        rows = _table_rows(path, kind, on_bytes)
    elif kind == _JSON:
        rows = _json_rows(path, on_bytes)
    elif kind in (JSON_LINES, ""):
        rows = _line_rows(path, on_bytes)
    else:
        raise TrainingError(
            f"[data] '{path}' must end in {', '.join((*KINDS, *TEXTS))}, perhaps with "
            f"{' or '.join(COMPRESSED)} after it, but ends in '{kind}'. Export it as one of these."
        )
    for where, row in rows:
        try:
            result = encode(row)
        except (MMFreeError, ValueError, RowError) as error:
            raise _fault(path, where, str(error)) from error
        yield result


def without_nulls(value: Any) -> Any:
    """A copy of nested values whose objects lack the keys that hold null. Lists keep all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def text_of(row: Mapping[str, Any], key: str) -> str:
    """The text under a key of a row."""
    if key not in row:
        meant = did_you_mean(key, row)
        raise RowError(f"it must have '{key}' but has {names_in(row)}.{meant}")
    value = row[key]
    if not isinstance(value, str):
        raise RowError(f"'{key}' must be text but is {kind_of(value)}.")
    return value


def names_in(row: Mapping[str, Any]) -> str:
    """The keys of a row as text."""
    names = [f"{key!r} (null)" if value is None else repr(key) for key, value in row.items()]
    return ", ".join(names)[:200] or "no keys"


def kind_of(value: Any) -> str:
    """The kind of a value as text."""
    return "null" if value is None else type(value).__name__


Rows = Iterator[tuple[str, dict[str, Any]]]
"""Rows, each with where it is in the file, for messages."""


def _text_rows(path: Path, key: str, on_bytes: OnBytes | None) -> Rows:
    for number, text in enumerate(read_documents(path, on_bytes=on_bytes), 1):
        if len(text) > MAX_ROW_BYTES:
            raise _fault(
                path,
                f"text {number}",
                f"it must have at most {MAX_ROW_BYTES:,} characters but has {len(text):,}. Split it "
                "with lines of <|endoftext|>.",
            )
        yield f"text {number}", {key: text}


def _line_rows(path: Path, on_bytes: OnBytes | None) -> Rows:
    for number, line in read_lines(path, MAX_ROW_BYTES, on_bytes):
        yield _parsed(path, f"line {number}", line)


def _parquet_rows(path: Path, on_bytes: OnBytes | None) -> Rows:
    for number, row in enumerate(parquet_documents(path, None, MAX_ROW_BYTES, on_bytes), 1):
        where, values = _parsed(path, f"row {number}", row.encode("utf-8", "surrogatepass"))
        # a column gives an object the keys of all others
        yield where, {name: without_nulls(value) for name, value in values.items()}


def _parsed(path: Path, where: str, text: bytes) -> tuple[str, dict[str, Any]]:
    try:
        # columns that are not read may hold NaN
        value = parse_json(text, max_bytes=MAX_ROW_BYTES, finite=False)
    except ValueError as error:
        raise _fault(path, where, f"it {error}.") from error
    if not isinstance(value, dict):
        raise _fault(path, where, f"it must be a JSON object but is {kind_of(value)}.")
    return where, value


def _fault(path: Path, where: str, words: str) -> TrainingError:
    # one location is reported, the one in the file
    words = re.sub(r"^\[[\w .]+\] ", "", words)
    return TrainingError(f"[data] '{path}' {where}: {words}")


# a text with its escapes, the mark of one that does not end, and what opens or closes a value
_DELIMITERS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = (b"{", b"["), (b"}", b"]")


def _json_rows(path: Path, on_bytes: OnBytes | None) -> Rows:
    data = bytearray()
    for chunk in read_chunks(path, on_bytes):
        data += chunk
        if len(data) > MAX_LIST_BYTES:
            raise TrainingError(
                f"[data] '{path}' must have at most {MAX_LIST_BYTES:,} bytes but has more. Write it as "
                f"JSON lines ({JSON_LINES}), which are read one by one."
            )
    text = bytes(data.removeprefix(codecs.BOM_UTF8))
    try:
        check_not_utf16(text)
    except ValueError as error:
        raise TrainingError(f"[data] '{path}' {error}.") from error
    for number, part in _objects(path, text):
        yield _parsed(path, f"line {number}", part)


def _objects(path: Path, text: bytes) -> Iterator[tuple[int, bytes]]:
    """The values of a list, or those that follow one another, and the lines that they begin at."""
    is_list = text.lstrip().startswith(b"[")
    outer = 1 if is_list else 0
    depth = start = end = found = 0
    line, counted = 1, 0

    def check_between(until: int, wanted: bytes) -> None:
        nonlocal line, counted
        line, counted = line + text.count(b"\n", counted, until), until
        if (between := text[end:until].strip()) != wanted:
            raise _fault(
                path,
                f"line {line}",
                f"{'a comma' if wanted else 'nothing'} must follow {found} objects here but "
                f"{between.decode(errors='replace')!r:.60} does. Write a list of objects, or one in "
                "each line.",
            )

    for mark in _DELIMITERS.finditer(text):
        sign = mark[0]
        closes_list = is_list and sign == b"]" and depth == outer
        if depth == outer:
            has_comma = is_list and found and not closes_list
            opens = closes_list or sign in _OPENING
            start = mark.start()
            check_between(start if opens else mark.end(), b"," if has_comma else b"")
        if sign in _OPENING:
            depth += 1
            end = mark.end() if depth == outer else end
        elif sign in _CLOSING:
            depth -= 1
            if closes_list:
                end = mark.end()
                break
            if depth == outer:
                found, end = found + 1, mark.end()
                yield line, text[start:end]
    if depth:
        raise _fault(path, f"line {line}", "the value that begins here must end but does not.")
    check_between(len(text), b"")


_SEPARATORS = (",", ";", "\t")
_QUOTED_FIELD = re.compile(r'"[^"]*"')


class _TableLines:
    """The lines of a table as texts.

    Attributes:
        row: The line at which the row begins that is read.
    """

    def __init__(self, path: Path, on_bytes: OnBytes | None):
        self._path = path
        self._lines = read_lines(path, MAX_ROW_BYTES, on_bytes, keeps_empty=True)
        self._last = self._used = 0
        self.row = 1

    def __iter__(self) -> Iterator[str]:
        for number, line in self._lines:
            self._last = number
            self._used += len(line)
            if self._used > MAX_ROW_BYTES:
                raise self.fault(
                    f"it must begin a row of at most {MAX_ROW_BYTES:,} bytes but begins a longer one. "
                    "Close its quotation marks."
                )
            try:
                yield decode_text(line) + "\n"
            except ValueError as error:
                raise _fault(self._path, f"line {self._last}", f"it {error}.") from error

    def end_row(self) -> None:
        self.row, self._used = self._last + 1, 0

    def fault(self, words: str) -> TrainingError:
        return _fault(self._path, f"line {self.row}", words)


def _table_rows(path: Path, kind: str, on_bytes: OnBytes | None) -> Rows:
    table = _TableLines(path, on_bytes)
    lines = iter(table)
    head = next(lines, "")
    bare = _QUOTED_FIELD.sub("", head)
    separator = "\t" if kind == _TSV else max(_SEPARATORS, key=bare.count)
    reader = csv.reader(chain((head,), lines), delimiter=separator, strict=True)
    names: list[str] = []
    while (fields := _fields(reader, table)) is not None:
        if not names:
            names = _names(fields, table)
        elif fields:
            if len(fields) != len(names):
                raise table.fault(
                    f"it must have {len(names)} fields, one for each column, but has {len(fields)}: "
                    + (
                        f"column {names[len(fields)]!r:.60} is missing"
                        if len(fields) < len(names)
                        else f"{fields[len(names)]!r:.60} follows the last column"
                    )
                    + f". Quote fields that hold {separator!r} or a line break."
                )
            yield f"line {table.row}", dict(zip(names, fields, strict=True))
        table.end_row()


def _fields(reader: Iterator[list[str]], table: _TableLines) -> list[str] | None:
    """The fields of the next row; `None` at the end."""
    # the limit is the whole process'; rows have one of their own
    limit = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        return next(reader, None)
    except csv.Error as error:
        raise table.fault(
            f"it must begin a row of a table but does not: {error}. Close quoted fields, and double "
            "the quotation marks in them."
        ) from error
    finally:
        csv.field_size_limit(limit)


def _names(fields: Sequence[str], table: _TableLines) -> list[str]:
    """The names of the columns."""
    names = [name.strip() for name in fields]
    if len(names) > MAX_COLUMNS:
        raise table.fault(
            f"it must name at most {MAX_COLUMNS:,} columns but names {len(names):,}. Keep those that "
            "are read."
        )
    for number, name in enumerate(names, 1):
        if not name:
            raise table.fault(f"it must name each column but column {number} has no name. Name it.")
        if name in names[: number - 1]:
            raise table.fault(
                f"it must name each column once but column {number} is {name!r:.60} again. Rename it."
            )
    return names


def _bare_rows(path: Path, columns: Sequence[str], on_bytes: OnBytes | None) -> Rows:
    """The rows of a table without names, whose first columns have the given ones."""
    for number, line in read_lines(path, MAX_ROW_BYTES, on_bytes):
        where = f"line {number}"
        try:
            values = decode_text(line).rstrip("\r\n").split("\t")
        except ValueError as error:
            raise _fault(path, where, f"it {error}.") from error
        if len(values) < len(columns):
            raise _fault(
                path,
                where,
                f"it must hold {' and '.join(map(repr, columns))}, separated by a tab, but has "
                f"{len(values)} of them.",
            )
        yield where, dict(zip(columns, values, strict=False))

"""Reads files that hold one JSON object, or one row of a table, on each line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import MMFreeError, TrainingError
from ..files.reading import decode_text, open_file, parse_json

MAX_LINE_BYTES = 4_000_000

Result = TypeVar("Result")


def read_lines(
    path: Path,
    encode: Callable[[dict[str, Any]], Result],
    columns: Sequence[str] = (),
    on_bytes: Callable[[int], object] = lambda _: None,
) -> Iterator[Result]:
    """What `encode` makes of each JSON object of a file.

    Args:
        path: The file: JSON lines, or a table (`.tsv`) if there are columns.
        encode: Is given an object by its keys. It may raise `LineError`.
        columns: Names of the first columns of a table, which are separated by tabs.
        on_bytes: Is told of the bytes that have been read.

    Raises:
        TrainingError: A line cannot be used. The message names the file and the line.
    """
    is_table = bool(columns) and path.suffix == ".tsv"
    for number, line in _lines(path):
        on_bytes(len(line))
        try:
            yield encode(_row(line, columns) if is_table else _parsed(line))
        except (MMFreeError, ValueError, LineError) as error:
            raise TrainingError(f"[data] '{path}' line {number}: {error}") from error


class LineError(Exception):
    """What is wrong with a line."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open_file(path) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TrainingError(
                        f"[data] '{path}' line {number}: it must have at most {MAX_LINE_BYTES:,} "
                        "bytes but has more. Split it into several samples."
                    )
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TrainingError(f"[data] '{path}' cannot be read: {error}.") from error


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        # columns that are not read may hold NaN
        value = parse_json(line, max_bytes=MAX_LINE_BYTES, finite=False)
    except ValueError as error:
        raise LineError(f"it {error}.") from error
    if not isinstance(value, dict):
        raise LineError(f"it must be a JSON object but is {kind_of(value)}.")
    return value


def _row(line: bytes, columns: Sequence[str]) -> dict[str, Any]:
    try:
        values = decode_text(line).rstrip("\r\n").split("\t")
    except ValueError as error:
        raise LineError(f"it {error}.") from error
    if len(values) < len(columns):
        raise LineError(
            f"it must hold {' and '.join(map(repr, columns))}, separated by a tab, but has "
            f"{len(values)} of them."
        )
    return dict(zip(columns, values, strict=False))


def text_of(line: Mapping[str, Any], key: str) -> str:
    """The text under a key of a line."""
    if key not in line:
        raise LineError(f"it must have '{key}' but has {names_in(line)}.")
    value = line[key]
    if not isinstance(value, str):
        raise LineError(f"'{key}' must be text but is {kind_of(value)}.")
    return value


def names_in(line: Mapping[str, Any]) -> str:
    """The keys of a line in words."""
    names = [f"{key!r} (null)" if value is None else repr(key) for key, value in line.items()]
    return ", ".join(names)[:200] or "no keys"


def kind_of(value: Any) -> str:
    """The kind of a value in words."""
    return "null" if value is None else type(value).__name__

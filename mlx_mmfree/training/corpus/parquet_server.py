"""Reads parquet files inside the confined process, by the package pyarrow."""

import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

# another allocator takes addresses ahead, which a limit on memory counts
os.putenv("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow
from pyarrow import parquet

from ...files.reading import open_file

# for each batch, all that rows may share is laid out anew
_BATCH_BYTES, _FEWEST_ROWS, _MOST_ROWS = 32_000_000, 256, 65_536
_ANSWER_BYTES = 4_000_000
_BUFFER_BYTES = 1_000_000

_rows: list[Iterator[tuple[int, str | None]]] = []


def handle(request: tuple[str, str | None, int] | None) -> dict[str, Any]:
    """Opens a file, or reads on.

    Args:
        request: The file, its column of texts, or `None` for rows as JSON, and the most bytes of a text;
            `None`: to read on.

    Returns:
        Of a file, its `rows`, its `columns`, and whether the one that is named `holds_texts`, with the
        `size_bytes` of its pages. Of what was read on, the `texts`, their `size_bytes` as lines, and the
        number of `rows`, 0 at the end.
    """
    try:
        return _next_rows() if request is None else _opened(*request)
    except MemoryError:
        # pyarrow raises one of its own
        raise MemoryError from None


def _opened(path: str, column: str | None, most_bytes: int) -> dict[str, Any]:
    stream = open_file(Path(path))
    metadata = parquet.read_metadata(stream)
    schema = metadata.schema.to_arrow_schema()
    index = -1 if column is None else schema.get_field_index(column)
    holds_texts = index >= 0 and _is_text(schema.field(index).type)
    if column is None:
        file = parquet.ParquetFile(stream, metadata=metadata, buffer_size=_BUFFER_BYTES)
        _rows[:] = [_objects(file, most_bytes)]
    elif holds_texts:
        # as a dictionary, a text that rows share is held once
        file = parquet.ParquetFile(
            stream, metadata=metadata, read_dictionary=[column], buffer_size=_BUFFER_BYTES
        )
        _rows[:] = [_texts(file, column, most_bytes)]
    sizes = [_page_bytes(metadata, group, column) for group in range(metadata.num_row_groups)]
    return {
        "rows": metadata.num_rows,
        "columns": schema.names,
        "holds_texts": holds_texts,
        "size_bytes": sum(sizes),
    }


def _page_bytes(metadata: Any, number: int, column: str | None) -> int:
    """The bytes of a column, or of all, in a group of rows, once they are decompressed."""
    group = metadata.row_group(number)
    chunks = (group.column(index) for index in range(group.num_columns))
    return sum(
        each.total_uncompressed_size for each in chunks if column in (None, each.path_in_schema)
    )


def _is_text(kind: Any) -> bool:
    value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return value in (pyarrow.string(), pyarrow.large_string())


def _batches(file: Any, column: str | None) -> Iterator[Any]:
    # rows of several groups would hold what each of these shares
    for group in range(file.metadata.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        rows = _BATCH_BYTES * count // max(_page_bytes(file.metadata, group, column), 1)
        yield from file.iter_batches(
            min(max(rows, _FEWEST_ROWS), _MOST_ROWS),
            row_groups=[group],
            columns=None if column is None else [column],
            use_threads=False,
        )


def _texts(file: Any, column: str, most_bytes: int) -> Iterator[tuple[int, str | None]]:
    """The size of each row as a line, and its text if it has one."""
    for entry in chain.from_iterable(batch.column(0) for batch in _batches(file, column)):
        if not entry.is_valid or not entry.value.is_valid:
            yield 1, None
            continue
        size = entry.value.as_buffer().size
        _check_size(size, most_bytes)
        yield size + 1, entry.value.as_py()


def _objects(file: Any, most_bytes: int) -> Iterator[tuple[int, str | None]]:
    """The size of each row as a line of JSON, and the line."""
    for batch in _batches(file, None):
        for index in range(batch.num_rows):
            [row] = batch.slice(index, 1).to_pylist()
            # dates and bytes are texts
            text = json.dumps(row, ensure_ascii=False, default=str)
            _check_size(len(text.encode("utf-8", "surrogatepass")), most_bytes)
            yield len(text) + 1, text


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise ValueError(f"a text must have at most {most_bytes:,} bytes but has {size:,}")


def _next_rows() -> dict[str, Any]:
    texts, size_bytes, rows = [], 0, 0
    while size_bytes < _ANSWER_BYTES and (entry := next(_rows[0], None)):
        size, text = entry
        size_bytes += size
        rows += 1
        if text is not None:
            texts.append(text)
    return {"texts": texts, "size_bytes": size_bytes, "rows": rows}

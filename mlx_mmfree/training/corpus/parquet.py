"""The documents of a parquet file, read by the package pyarrow, which comes with an extra."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import TrainingError, install_extra
from ...files.opening import open_file
from .pieces import OnBytes

_ROWS_AT_A_TIME = 256
_MAX_GROUP_BYTES = 2_000_000_000


def parquet_documents(path: Path, column: str, on_bytes: OnBytes | None) -> Iterator[str]:
    """The texts of one column in order. Rows without a text are left out.

    Raises:
        TrainingError: pyarrow is missing, the file is damaged, or the column does not hold texts.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise TrainingError(
            f"[data] '{path}' is a parquet file, for which pyarrow is needed, but it is not installed. "
            + install_extra("parquet")
        ) from error
    try:
        with open_file(path) as stream:
            file = parquet.ParquetFile(stream)
            _check(file, pyarrow, column, path)
            size, rows = stream.seek(0, 2), max(file.metadata.num_rows, 1)
            read = 0
            for batch in file.iter_batches(_ROWS_AT_A_TIME, columns=[column], use_threads=False):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
                if on_bytes is not None:
                    on_bytes((read + batch.num_rows) * size // rows - read * size // rows)
                read += batch.num_rows
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"[data] '{path}' must be a readable parquet file: {reason:.300}"
        ) from error


def _check(file: Any, pyarrow: Any, column: str, path: Path) -> None:
    """Refuses another kind of column, and groups of rows that are too large to be read at once."""
    schema = file.schema_arrow
    place = schema.get_field_index(column)
    kinds = (pyarrow.string(), pyarrow.large_string())
    if place < 0 or schema.field(place).type not in kinds:
        names = ", ".join(f"'{name:.40}'" for name in schema.names[:8]) or "none"
        raise TrainingError(
            f"[data] '{path}': 'text_column' must name a column of texts but {column!r:.60} does not. "
            f"The columns are {names}."
        )
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > _MAX_GROUP_BYTES:
        raise TrainingError(
            f"[data] '{path}' must have groups of rows of at most {_MAX_GROUP_BYTES:,} bytes but has "
            f"one of {largest:,}. Write it again with smaller groups."
        )

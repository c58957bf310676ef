"""The documents of a parquet file, read by the package pyarrow, which comes with an extra.

A few bytes of such a file can stand for any number, and pyarrow takes the memory for them first. So it
runs in a process with limits.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ...errors import TrainingError, install_extra
from ...platform.confinement import ConfinedProcess, LimitError
from .pieces import Growth, OnBytes

# pages of texts grow to a few times their size, and are held a few times over
_MEMORY_BYTES, _MEMORY_OF_A_BYTE = 2**30, 16
_CPU_SECONDS = 60.0


def parquet_documents(
    path: Path, column: str, most_bytes: int, on_bytes: OnBytes | None
) -> Iterator[str]:
    """The texts of one column in order. Rows without a text are left out.

    Args:
        path: The file.
        column: The column.
        most_bytes: The most that a text may have.
        on_bytes: Is told of the bytes that have been read.

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
        process = ConfinedProcess(
            "mlx_mmfree.training.corpus.parquet_server",
            ("pyarrow",),
            _MEMORY_BYTES + _MEMORY_OF_A_BYTE * size,
        )
        found = process.ask((str(path.absolute()), column, most_bytes), _CPU_SECONDS)
        _check_column(found["columns"], found["holds_texts"], column, path)
        # what the file says of itself, before anything is decompressed, and then what there is
        Growth(path, "text", size).add(found["size_bytes"])
        growth = Growth(path, "text", size)
        rows, read = max(found["rows"], 1), 0
        while (part := process.ask(None, _CPU_SECONDS))["rows"]:
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

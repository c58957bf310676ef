"""The documents of parquet files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.documents import read_documents

needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system counts memory in another unit"
)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TrainingError, match=r"pip install '\.\[parquet\]'"):
        list(read_documents(tmp_path / "a.parquet"))


@pytest.mark.parquet
def test_rows_are_documents(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    texts = [f"é {n}" for n in range(1000)]
    table = pa.table({"id": range(1002), "text": [*texts, None, ""], "other": ["x"] * 1002})
    read: list[int] = []
    for kind in (pa.string(), pa.large_string()):
        typed = table.set_column(1, "text", table["text"].cast(kind))
        write_table(typed, tmp_path / "a.parquet", row_group_size=300)
        assert list(read_documents(tmp_path / "a.parquet", on_bytes=read.append)) == texts
    assert sum(read[len(read) // 2 :]) == (tmp_path / "a.parquet").stat().st_size
    for column in ("id", "absent"):
        with pytest.raises(TrainingError, match="The columns are 'id', 'text', 'other'"):
            list(read_documents(tmp_path / "a.parquet", column))


@pytest.mark.parquet
@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_damaged_files_are_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(TrainingError, match=r"a\.parquet' must be a readable parquet file"):
        list(read_documents(tmp_path / "a.parquet"))


def _memory(path: Path) -> tuple[int, str]:
    """Most megabytes that any process held while the file was read, and how it ended."""
    code = """
import resource, sys
from pathlib import Path
from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.documents import read_documents
try:
    print(sum(map(len, read_documents(Path(sys.argv[1])))))
except TrainingError as error:
    print(error)
import gc; gc.collect()
own = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=300
    )
    *words, megabytes = done.stdout.splitlines()
    return int(megabytes), "\n".join(words)


def _shared(text: str, rows: int) -> Any:
    """A table whose rows share a text."""
    import pyarrow as pa

    indices = pa.array([0] * rows, pa.int32())
    return pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([text]))})


def _written(path: Path, table: Any, **options: Any) -> Path:
    from pyarrow.parquet import write_table

    # in one dictionary, as pyarrow writes few and small texts
    options = {"dictionary_pagesize_limit": 2**30, "store_schema": False, **options}
    write_table(table, path, compression="zstd", **options)
    return path


def _random_text(seed: int, letters: int) -> str:
    return np.random.default_rng(seed).integers(33, 126, letters, np.uint8).tobytes().decode()


@needs_linux
@pytest.mark.parquet
@pytest.mark.parametrize("rows_of_a_group", [250, 5])
def test_a_text_that_rows_share_takes_no_memory_of_many(
    tmp_path: Path, rows_of_a_group: int
) -> None:
    table = _shared("a" * 10_000_000, 250)
    path = _written(tmp_path / "a.parquet", table, row_group_size=rows_of_a_group)
    assert path.stat().st_size < 60_000
    megabytes, words = _memory(path)
    assert "a.parquet' must hold text, which grows at most 100 times, but it grows to over" in words
    assert megabytes < 400, words


@needs_linux
@pytest.mark.parquet
@pytest.mark.parametrize(("rows", "rows_of_a_group"), [(50, 50), (50, 2), (250, 250)])
def test_rows_that_share_what_does_not_compress(
    tmp_path: Path, rows: int, rows_of_a_group: int
) -> None:
    table = _shared(_random_text(1, 1_000_000), rows)
    megabytes, words = _memory(
        _written(tmp_path / "a.parquet", table, row_group_size=rows_of_a_group)
    )
    wanted = f"{rows * 1_000_000}" if rows == 50 else "grows at most 100 times"
    assert wanted in words
    assert megabytes < 400, words


@pytest.mark.parquet
@pytest.mark.parametrize("use_dictionary", [False, True])
def test_pages_of_large_texts(tmp_path: Path, use_dictionary: bool) -> None:
    import pyarrow as pa

    texts = [_random_text(n, 1_000_000) for n in range(60)]
    path = _written(
        tmp_path / "a.parquet", pa.table({"text": texts}), use_dictionary=use_dictionary
    )
    assert list(read_documents(path)) == texts


@needs_linux
@pytest.mark.parquet
def test_pages_that_claim_to_be_small_are_read_within_a_limit(tmp_path: Path) -> None:
    from pyarrow.parquet import read_metadata

    path = _written(tmp_path / "a.parquet", _shared("a" * 140_000_000, 1))
    group = read_metadata(path).row_group(0)
    claims = {group.total_byte_size: 0, group.column(0).total_uncompressed_size: 0}
    data = path.read_bytes()
    # the length and the text of the page of the dictionary
    for old, new in {**claims, 140_000_004: 2**31 - 1}.items():
        assert _number(old) in data
        data = data.replace(_number(old), _number(new, len(_number(old))))
    path.write_bytes(data)
    megabytes, words = _memory(path)
    assert "it takes over 1024 MB of memory" in words
    assert megabytes < 400, words


def _number(value: int, size: int = 0) -> bytes:
    """A number as the headers of a parquet file hold it, in so many bytes at least."""
    value, found = 2 * value, []
    while value >= 128 or len(found) + 1 < size:
        found.append(value % 128 + 128)
        value //= 128
    return bytes([*found, value])


@pytest.mark.parquet
@pytest.mark.parametrize("value", [["a"], {"text": "a"}, 1, b"a"])
def test_another_kind_of_column_is_refused(tmp_path: Path, value: object) -> None:
    import pyarrow as pa

    path = _written(tmp_path / "a.parquet", pa.table({"text": [value]}))
    with pytest.raises(TrainingError, match="'text_column' must name a column of texts but 'text'"):
        list(read_documents(path))


@pytest.mark.parquet
def test_a_text_beyond_the_limit_of_a_line_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    path = _written(tmp_path / "a.parquet", pa.table({"text": [_random_text(2, 650_000) * 100]}))
    with pytest.raises(TrainingError, match="a text must have at most 64,000,000 bytes but has 65"):
        list(read_documents(path))

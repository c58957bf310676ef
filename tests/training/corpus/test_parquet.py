"""The documents of parquet files."""

import sys
from pathlib import Path

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.documents import read_documents


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

"""Files and folders as sources of documents."""

import gzip
from pathlib import Path

import pytest

from mlx_mmfree.errors import CheckpointError, TrainingError
from mlx_mmfree.training.corpus.tokenize import find_sources, read_sources


def _fill(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _read(*data: object, include: tuple[str, ...] = ()) -> list[str]:
    return list(read_sources(find_sources([str(d) for d in data], include), "text"))


def test_a_folder_is_read_in_the_order_of_names_at_any_depth(tmp_path: Path) -> None:
    _fill(tmp_path, b_txt="2", a__z_txt="1", c_txt="4", README_md="no", _hidden_txt="no")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"3"))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x.txt").write_text("no")
    assert _read(tmp_path) == ["1", "2", "3", "4"]
    files = find_sources([str(tmp_path)])
    assert [file.name for file in files] == ["a/z.txt", "b.txt", "b.txt.gz", "c.txt"]
    assert sum(file.size_bytes for file in files) == 3 + len(gzip.compress(b"3"))


def test_several_sources_come_in_their_order(tmp_path: Path) -> None:
    _fill(tmp_path, b__x_txt="1", a_txt="2", c_md="3")
    assert _read(tmp_path / "b", tmp_path / "a.txt", tmp_path / "c.md") == ["1", "2", "3"]


def test_patterns_choose_files(tmp_path: Path) -> None:
    _fill(tmp_path, data__train_txt="1", data__test_txt="2", more_jsonl='{"text": "3"}')
    assert _read(tmp_path, include=("*train*",)) == ["1"]
    assert _read(tmp_path, include=("data/t*", "*.jsonl")) == ["2", "1", "3"]
    with pytest.raises(TrainingError, match=r"of one kind but holds \.jsonl and \.txt"):
        _read(tmp_path)
    with pytest.raises(TrainingError, match=r"a file that matches x\*, but holds data/test\.txt"):
        _read(tmp_path, include=("x*",))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"\.parquet files, and such a file, but holds no file"):
        _read(tmp_path)
    with pytest.raises(CheckpointError, match="must be a file, a folder or a Hub dataset"):
        _read(tmp_path / "absent")


def test_links_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    _fill(tmp_path, secret_txt="s", data__a_txt="a")
    (tmp_path / "data/b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(TrainingError, match="outside of its folder"):
        _read(tmp_path / "data")

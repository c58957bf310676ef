"""The rows of data files as people have them: tables, lists of JSON, texts, compressed or not."""

import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.rows import read_rows

ROWS = [{"a": "x\ny", "b": 'say "hi"'}, {"a": "1,5;2", "b": "é\tz"}]


def _rows(file: Path, content: bytes | str, **options: Any) -> list[dict[str, Any]]:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(file, lambda row: row, **options))


def _table(separator: str, line_end: str = "\n") -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    rows = [list(ROWS[0]), *([quoted(text) for text in row.values()] for row in ROWS)]
    return line_end.join(map(separator.join, rows)) + line_end


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_table_with_any_separator(
    tmp_path: Path, separator: str, line_end: str, mark: str
) -> None:
    assert _rows(tmp_path / "a.csv", mark + _table(separator, line_end)) == ROWS
    if separator == "\t":
        assert _rows(tmp_path / "a.tsv", mark + _table(separator, line_end)) == ROWS


def test_a_table_as_the_standard_library_writes_it(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["a", "b"])
        writer.writeheader()
        writer.writerows(ROWS)
    assert list(read_rows(tmp_path / "a.csv", lambda row: row)) == ROWS


def test_empty_lines_of_a_table_do_not_count(tmp_path: Path) -> None:
    assert _rows(tmp_path / "a.csv", "a,b\n\n1,2\n\n") == [{"a": "1", "b": "2"}]
    assert _rows(tmp_path / "a.csv", "") == []


def test_a_field_may_be_longer_than_the_limit_of_the_package(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    [row] = _rows(tmp_path / "a.csv", 'a,b\n"' + "x" * 2 * limit + '",1\n')
    assert len(row["a"]) == 2 * limit
    assert csv.field_size_limit() == limit


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3\n", "line 3: it must have 2 fields, .* has 1: column 'b' is missing"),
        ('a,b\n"1\n1",2\n3\n', "line 4: it must have 2 fields"),
        ("a,b\n1,2,3\n", "line 2: .* has 3: '3' follows the last column"),
        ("a,b,a\n", "line 1: it must name each column once but column 3 is 'a' again"),
        ("a,,c\n", "line 1: it must name each column but column 2 has no name"),
        (",".join(map(str, range(1001))), "line 1: .* at most 1,000 columns but names 1,001"),
        ('a,b\n1,"2"3\n', "line 2: it must begin a row of a table but does not"),
        ('a,b\n1,2\n3,"4\n5,6\n', "line 3: it must begin a row of a table but does not"),
        (b"a,b\n1,\xff\n", "line 2: it must be UTF-8 but is not at byte 2"),
        ("a,b\n1,2\n".encode("utf-16"), "line 1: it must be UTF-8 but is UTF-16"),
        ('a\n"' + "x\n" * 2_100_000 + '"\n', "line 2: "),
        ("a\n" + "x" * 4_100_000, "line 2: it must have at most 4,000,000 bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_faulty_table_names_the_line_and_the_column(
    tmp_path: Path, content: bytes | str, message: str
) -> None:
    with pytest.raises(TrainingError, match=r"a\.csv' " + message):
        _rows(tmp_path / "a.csv", content)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff" + json.dumps(ROWS),
        "\n".join(map(json.dumps, ROWS)),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
    ],
    ids=["list", "indented", "marked", "lines", "objects"],
)
def test_json_is_a_list_or_objects_one_after_another(tmp_path: Path, content: str) -> None:
    assert _rows(tmp_path / "a.json", content) == ROWS


def test_brackets_and_quotes_in_texts_of_json_are_texts(tmp_path: Path) -> None:
    row = {"a": ['}]"{[\\', {"b": [[]]}], "c": "\\"}
    assert _rows(tmp_path / "a.json", json.dumps([row, row])) == [row, row]
    assert _rows(tmp_path / "a.json", "[]") == _rows(tmp_path / "a.json", " ") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n{"a": }]', "line 2: it must be JSON but is not"),
        ('[{"a": 1}\n{"a": 1}]', "line 2: a comma must follow 1 objects"),
        ('[{"a": 1},]', "line 1: nothing must follow 1 objects here but ',' does"),
        ('[{"a": 1}] x', "line 1: nothing must follow 1 objects here but 'x' does"),
        ('[{"a": 1},\n\n "b"]', "line 3: a comma must follow 1 objects"),
        ("[1, 2]", "line 1: nothing must follow 0 objects here but '1, 2' does"),
        ("[[1]]", "line 1: it must be a JSON object but is list"),
        ('[{"a": 1},\n {"a', "line 2: the value that begins here must end but does not"),
        ("[" * 100_000, "line 1: the value that begins here must end but does not"),
        ("}", "line 1: nothing must follow 0 objects here but '}' does"),
        ('[{"a": 1}]'.encode("utf-16"), "must be UTF-8 but is UTF-16"),
        (b'[{"a": "\xff"}]', "line 1: it must be UTF-8 but is not"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_faulty_list_names_the_line(tmp_path: Path, content: bytes | str, message: str) -> None:
    with pytest.raises(TrainingError, match=r"a\.json' " + message):
        _rows(tmp_path / "a.json", content)


@pytest.mark.exhaustive
def test_compressed_rows(tmp_path: Path) -> None:
    for suffix, packed in ((".xz", lzma.compress), (".gz", gzip.compress)):
        assert _rows(tmp_path / f"a.csv{suffix}", packed(_table(",").encode())) == ROWS
        assert _rows(tmp_path / f"a.json{suffix}", packed(json.dumps(ROWS).encode())) == ROWS
        lines = "\n".join(map(json.dumps, ROWS)).encode()
        assert _rows(tmp_path / f"a.jsonl{suffix}", packed(lines)) == ROWS
    with pytest.raises(TrainingError, match="must"):
        _rows(tmp_path / "a.csv.xz", lzma.compress(b"a\n" + b"x\n" * 100_000_000))
    with pytest.raises(TrainingError, match=r"b\.csv\.xz' must be a readable"):
        _rows(tmp_path / "b.csv.xz", "a,b")


def test_a_text_is_one_row(tmp_path: Path) -> None:
    assert _rows(tmp_path / "a.md", "# Hi\n\nYou.\n") == [{"text": "# Hi\n\nYou."}]
    assert _rows(tmp_path / "a.txt", "One<|endoftext|>\nTwo", text_key="story") == [
        {"story": "One"},
        {"story": "Two"},
    ]


def test_a_text_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"text 2: it must have at most 4,000,000 characters"):
        _rows(tmp_path / "a.txt", "One<|endoftext|>" + "x" * 4_000_001)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"must end in \.jsonl, .* but ends in '\.xlsx'"):
        _rows(tmp_path / "a.xlsx", "PK")


def test_a_table_without_names_has_the_given_ones(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "a.tsv", "1\t2\t3\n", columns=("a", "b"))
    assert rows == [{"a": "1", "b": "2"}]
    with pytest.raises(TrainingError, match="line 1: it must hold 'a' and 'b', separated by a tab"):
        _rows(tmp_path / "a.tsv", "1\n", columns=("a", "b"))

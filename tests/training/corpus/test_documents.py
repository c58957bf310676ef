"""The documents of text files and JSON lines."""

import codecs
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus import documents
from mlx_mmfree.training.corpus.documents import read_documents


def test_plain_and_compressed_texts(tmp_path: Path) -> None:
    text = "One.\nTwo.\n<|endoftext|>\n\n<|endoftext|>\nThree.\n<|endoftext|>\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.txt", "a.txt.xz", "a.txt.gz"):
        assert list(read_documents(tmp_path / name)) == ["One.\nTwo.", "Three."]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_a_byte_order_mark_is_no_part_of_a_text(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    suffix = {gzip.compress: ".gz", lzma.compress: ".xz"}.get(pack, "")
    text, lines = tmp_path / f"a.txt{suffix}", tmp_path / f"a.jsonl{suffix}"
    text.write_bytes(pack(codecs.BOM_UTF8 + "Größe\ufeff".encode()))
    assert list(read_documents(text)) == ["Größe\ufeff"]
    lines.write_bytes(pack(codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}\n'))
    assert list(read_documents(lines)) == ["a", "b"]
    for path, where in ((text, ""), (lines, " line 1: it")):
        path.write_bytes(pack('{"text": "a"}'.encode("utf-16")))
        with pytest.raises(TrainingError, match=f"'{where} must be UTF-8 but is UTF-16"):
            list(read_documents(path))


@pytest.mark.parametrize("size", range(1, 20))
def test_chunks_cut_no_character_and_no_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(documents, "_CHUNK_BYTES", size)
    (tmp_path / "a.txt").write_text("é\n<|endoftext|>\n字 a <|endoftext b\n")
    assert list(read_documents(tmp_path / "a.txt")) == ["é", "字 a <|endoftext b"]
    lines = [{"text": "é\n"}, {"odd": 1, "text": "字"}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines))
    assert list(read_documents(tmp_path / "a.jsonl")) == ["é\n", "字"]


def test_long_texts_are_cut_at_line_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 10)
    long = "one two\nthree\n" + "x" * 25
    want = ["one two", "three", "x" * 10, "x" * 10, "x" * 5]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}))
    for size in (7, 1000):
        monkeypatch.setattr(documents, "_CHUNK_BYTES", size)
        (tmp_path / "a.txt").write_text(long)
        assert list(read_documents(tmp_path / "a.txt")) == want
        assert list(read_documents(tmp_path / "a.jsonl")) == want


def test_a_file_is_read_as_its_documents_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a<|endoftext|>" * 200_000)
    read: list[int] = []
    stream = read_documents(tmp_path / "a.txt", on_bytes=read.append)
    assert next(stream) == "a" and not read
    assert sum(1 for _ in stream) == 199_999
    assert len(read) > 1 and sum(read) == (tmp_path / "a.txt").stat().st_size


@pytest.mark.parametrize("data", [b"\xff\xfa", b"a\xc3", None])
def test_unreadable_file_is_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "bad.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"bad\.txt' must be a readable UTF-8 text file"):
        list(read_documents(path))


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_small_file_that_stores_very_much_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"zeros.{suffix}"
    zeros = bytes(10_000_000)
    packed = lzma.compress(zeros, preset=0) if suffix == "xz" else gzip.compress(zeros)
    path.write_bytes(packed)
    with pytest.raises(TrainingError, match="at most 100 times"):
        list(read_documents(path))


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_damaged_packing_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    packed = (lzma if suffix == "xz" else gzip).compress(os.urandom(1000).hex().encode())
    for damaged in (packed[:-1], packed[: len(packed) // 2], b"not packed", b"\0" + packed):
        path.write_bytes(damaged)
        with pytest.raises(TrainingError, match="must be a readable UTF-8 text file"):
            list(read_documents(path))


def test_pipes_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(TrainingError, match="it is a pipe"):
        list(read_documents(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1}', r"a\.jsonl' line 2: 'text_column' must name a key with a text but 'text'"),
        ('{"content": "a"}', "The keys are 'content'"),
        ("[1]", "line 2: it must be a JSON object but is list"),
        ("{", "line 2: it must be JSON but is not"),
        ("x" * 200, "line 2: it must have at most 100 bytes"),
    ],
)
def test_wrong_lines_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(TrainingError, match=message):
        list(read_documents(tmp_path / "a.jsonl"))


def test_another_key_holds_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "a"}\n{"content": ""}\n{"content": null}\n')
    assert list(read_documents(tmp_path / "a.jsonl", "content")) == ["a"]

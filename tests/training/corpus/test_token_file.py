"""Token files: what is written is read, and what is damaged or changes is refused."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus.tokenize import (
    HEADER_BYTES,
    TokenFile,
    TokenFileWriter,
    open_token_file,
)

DIGEST = "ab" * 32


def write(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    with open(path, "wb") as stream:
        writer = TokenFileWriter(stream, vocab_size, 0, DIGEST)
        writer.add(ids[:3], ["é", "b"])
        writer.add(ids[3:], ["cd"])
        writer.finish()


@pytest.mark.parametrize(
    ("vocab_size", "bits"), [(300, 16), (2**16, 16), (2**16 + 1, 32), (2**31, 32)]
)
def test_ids_come_back_in_the_least_width(tmp_path: Path, vocab_size: int, bits: int) -> None:
    ids = np.array([5, 0, 7, vocab_size - 1, 0], np.uint32)
    write(tmp_path / "a.tokens", ids, vocab_size)
    file = open_token_file(tmp_path / "a.tokens")
    assert np.array_equal(file.tokens[:], ids)
    assert file.tokens[1:3].tolist() == ids[1:3].tolist() and file.tokens[4:9].tolist() == [0]
    assert len(file.tokens.first(3)) == 3 and file.tokens.first(3)[1:].tolist() == [0, 7]
    assert file.tokens.dtype.itemsize * 8 == file.header.bits == bits
    header = file.header
    assert (header.tokens, header.documents, header.size_bytes) == (5, 3, 5)
    assert (header.vocab_size, header.end_of_text, header.tokenizer) == (vocab_size, 0, DIGEST)
    size = (tmp_path / "a.tokens").stat().st_size
    assert size == HEADER_BYTES + 5 * bits // 8


def test_a_file_is_what_its_description_says(tmp_path: Path) -> None:
    ids = np.array([7, 1, 299, 1], "<u2").tobytes()
    header = {
        "bits": 16,
        "tokens": 4,
        "documents": 2,
        "size_bytes": 9,
        "vocab_size": 300,
        "end_of_text": 1,
        "tokenizer": DIGEST,
        "checksum": hashlib.sha256(ids).hexdigest(),
        "version": 1,
    }
    head = (b"MMFTOKEN" + json.dumps(header).encode()).ljust(4096)
    (tmp_path / "a.tokens").write_bytes(head + ids)
    file = open_token_file(tmp_path / "a.tokens")
    assert file.tokens[:].tolist() == [7, 1, 299, 1]
    assert file.header.to_bytes() == head


def test_a_file_without_documents_is_not_written(tmp_path: Path) -> None:
    with open(tmp_path / "a.tokens", "wb") as stream:
        writer = TokenFileWriter(stream, 10, 0, DIGEST)
        with pytest.raises(TrainingError, match="must hold a document"):
            writer.finish()


def _changed(path: Path, **values: Any) -> None:
    data = path.read_bytes()
    header = json.loads(data[8:HEADER_BYTES]) | values
    header = {name: value for name, value in header.items() if value is not ...}
    path.write_bytes(
        (data[:8] + json.dumps(header).encode()).ljust(HEADER_BYTES) + data[HEADER_BYTES:]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 8}, "'vocab_size' in its header must be from 1 to 0 but is 300"),
        ({"bits": 32}, "must have 4,116 bytes for its ids but has 4,106"),
        ({"bits": True}, "'bits' in its header must not be True"),
        ({"tokens": 6}, "must have 4,108 bytes"),
        ({"tokens": 2**60}, "'tokens' in its header must be from 1"),
        ({"tokens": 0}, "'tokens' in its header must be from 1"),
        ({"documents": 6}, "'documents' in its header must be from 1 to 5 but is 6"),
        ({"size_bytes": -1}, "'size_bytes' in its header must be from 1"),
        ({"vocab_size": 299}, "its ids must be below 'vocab_size', 299, but one is 299"),
        ({"vocab_size": 2**17}, "'vocab_size' in its header must be from 1 to 65536"),
        ({"end_of_text": 300}, "'end_of_text' in its header must be from 0 to 299"),
        ({"checksum": "0" * 64}, "its ids must have the checksum in its header but are damaged"),
        ({"tokenizer": "../x"}, "'tokenizer' in its header must be a SHA-256"),
        ({"version": 2}, "its version must be 1 but is 2"),
        ({"version": ...}, "its header must hold bits, tokens"),
        ({"odd": 1}, "its header must hold bits, tokens"),
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.tokens"
    write(path, np.array([5, 0, 7, 299, 0]), 300)
    _changed(path)
    open_token_file(path)
    _changed(path, **values)
    with pytest.raises(TrainingError, match=message) as caught:
        open_token_file(path)
    assert f"'{path}' must be a token file" in str(caught.value)


def test_damage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    write(path, np.array([5, 0, 7, 299, 0]), 300)
    data = path.read_bytes()
    for wrong, message in (
        (data[:-1], "must have 4,106 bytes"),
        (data + b"\0", "must have 4,106 bytes"),
        (data[:-2] + b"\1\0", "checksum"),
        (data[:100], "whole header"),
        (b"", "whole header"),
        (b"X" + data[1:], "must begin with MMFTOKEN"),
        (data[:8] + bytes(HEADER_BYTES - 8) + data[HEADER_BYTES:], "its header must be JSON"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(TrainingError, match=message):
            open_token_file(path)
    path.unlink()
    with pytest.raises(TrainingError, match="No such file"):
        open_token_file(path)


def _opened(path: Path) -> TokenFile:
    write(path, np.array([5, 0, 7, 299, 0]), 300)
    file = open_token_file(path)
    assert file.tokens[:].tolist() == [5, 0, 7, 299, 0]
    return file


@pytest.mark.parametrize("size", [0, HEADER_BYTES, HEADER_BYTES + 4, HEADER_BYTES + 9])
def test_a_file_that_shrinks_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.tokens"
    file = _opened(path)
    os.truncate(path, size)
    # also if the rows that are asked for are still there
    for rows in (slice(0, 5), slice(0, 2)):
        with pytest.raises(TrainingError, match=r"a\.tokens' must stay as it is while .* changed"):
            file.tokens[rows]


@pytest.mark.parametrize("ids", [[5, 0, 7, 300, 0], [5, 1, 7, 299, 0]], ids=str)
def test_ids_that_change_are_named(tmp_path: Path, ids: list[int]) -> None:
    path = tmp_path / "a.tokens"
    file = _opened(path)
    with open(path, "r+b") as stream:
        stream.seek(HEADER_BYTES)
        stream.write(np.array(ids, "<u2").tobytes())
    with pytest.raises(
        TrainingError, match=r"must stay as it is while it is read, but was changed"
    ):
        file.tokens[:2]


def test_a_file_that_is_replaced_or_touched_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    file = _opened(path)
    os.utime(path, (1, 1))
    assert file.tokens[2:4].tolist() == [7, 299]
    write(tmp_path / "b.tokens", np.array([1, 2, 3, 4, 0]), 300)
    os.replace(tmp_path / "b.tokens", path)
    assert file.tokens[2:4].tolist() == [7, 299]

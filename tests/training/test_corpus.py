"""Documents, token streams and the mixture of batches."""

import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.corpus import Mixture, Stage, TokenStream, read_documents, tokenize


def test_documents_of_plain_and_compressed_files(tmp_path: Path) -> None:
    text = "One.\nTwo.\n<|endoftext|>\nThree.\n<|endoftext|>\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    for name in ("a.txt", "a.txt.xz"):
        assert read_documents(tmp_path / name) == ["One.\nTwo.", "Three."]


def test_stream_ends_each_document_and_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab\n<|endoftext|>\né")
    stream = tokenize(path, lambda text: [ord(c) for c in text], 0)
    assert stream.tokens.tolist() == [97, 98, 0, 233, 0]
    assert stream.size_bytes == 4


@pytest.mark.parametrize("data", [b"\xff\xfe", None])
def test_unreadable_file_is_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "bad.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TrainingError, match=r"bad\.txt' must be a readable UTF-8 text file"):
        read_documents(path)


def test_small_file_that_stores_very_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zeros.xz"
    path.write_bytes(lzma.compress(bytes(10_000_000), preset=0))
    with pytest.raises(TrainingError, match="at most 100 times"):
        read_documents(path)


def test_pipes_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(TrainingError, match="it is a pipe"):
        read_documents(tmp_path / "a.txt")


def _mixture(seed: int = 0) -> Mixture:
    streams = {
        "low": TokenStream(np.arange(1000, dtype=np.int32), 1000),
        "high": TokenStream(np.arange(5000, 5500, dtype=np.int32), 500),
    }
    stages = (Stage(0.5, {"low": 1, "high": 6}), Stage(1, {"low": 1}))
    return Mixture(streams, stages, seed)


def test_batch_depends_on_seed_and_step_alone() -> None:
    first = _mixture().batch(3, 10, 4, 8)
    _mixture().batch(1, 10, 4, 8)
    assert np.array_equal(_mixture().batch(3, 10, 4, 8), first)
    assert not np.array_equal(_mixture().batch(4, 10, 4, 8), first)
    assert not np.array_equal(_mixture(1).batch(3, 10, 4, 8), first)


def test_rows_are_windows_of_the_streams() -> None:
    batch = _mixture().batch(0, 10, 16, 8)
    assert batch.shape == (16, 9)
    assert (np.diff(batch, axis=1) == 1).all()


def test_mixture_follows_sizes_weights_and_stages() -> None:
    batch = _mixture().batch(0, 10, 4000, 4)
    assert (batch[:, 0] >= 5000).mean() == pytest.approx(0.75, abs=0.03)
    assert (_mixture().batch(5, 10, 100, 4) < 1000).all()

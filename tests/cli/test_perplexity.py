"""`mmfree perplexity` on small files."""

import gzip
import json
import lzma
import math
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_mmfree import demo
from mlx_mmfree.cli import main
from mlx_mmfree.evaluation import measure_perplexity
from mlx_mmfree.hub import load, save_model
from mlx_mmfree.training.corpus.documents import read_documents
from mlx_mmfree.training.corpus.tokenize import open_token_file, write_token_file
from tests.hub.checkpoints import GOLDENS, tiny_transformer

Captured = pytest.CaptureFixture[str]
TEXT = "Once upon a time, there was a little girl. She said: <|im_end|> café! " * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    target = tmp_path / "text.txt"
    target.write_text(TEXT, encoding="utf-8")
    return target


def metrics(capsys: Captured, *arguments: str) -> dict[str, float]:
    assert main(["perplexity", "--json", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def nats_in_one_pass(folder: Path, with_first: bool) -> tuple[float, int]:
    model, tokenizer = load(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False, parse_special=False)
    ids = [tokenizer.bos_token_id, *ids] if with_first else ids
    logits, _ = model(mx.array([ids[:-1]]))
    losses = nn.losses.cross_entropy(logits[0].astype(mx.float32), mx.array(ids[1:]))
    return float(np.array(losses, np.float64).sum()), len(ids) - 1


def test_a_recurrent_model_carries_its_state(folder: Path, file: Path, capsys: Captured) -> None:
    flags = ["--model", str(folder), "--data", str(file), "--sequence-length", "16"]
    got = metrics(capsys, *flags)
    nats, count = nats_in_one_pass(folder, with_first=True)
    assert (got["tokens"], got["size_bytes"]) == (count, len(TEXT.encode()))
    assert got["carries_state"] is True
    assert got["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(nats / math.log(2) / got["size_bytes"], rel=1e-5)
    assert got["standard_error"] > 0
    empty = metrics(capsys, *flags, "--no-carry-state", "--batch-size", "3")
    assert empty["carries_state"] is False
    assert empty["tokens"] == count
    assert empty["perplexity"] != pytest.approx(got["perplexity"], rel=1e-4)


def test_without_a_first_token_the_first_of_the_text_is_not_predicted(
    file: Path, capsys: Captured
) -> None:
    got = metrics(capsys, "--data", str(file), "--sequence-length", "1000")
    nats, count = nats_in_one_pass(demo.path(), with_first=False)
    _, tokenizer = load(demo.path())
    first = tokenizer.decode(tokenizer.encode(TEXT)[:1])
    assert got["tokens"] == count
    assert got["size_bytes"] == len(TEXT.encode()) - len(first)
    assert got["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
@pytest.mark.parametrize("windows", [[], ["--num-samples", "2"]])
def test_ends_of_texts_are_read_as_in_training(
    suffix: str, windows: list[str], tmp_path: Path, capsys: Captured
) -> None:
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(suffix, bytes)
    stories = ["\nThe cat sat.\nIt slept.\n", "", "A dog!", "The end of a story that is longer.\n"]
    file = tmp_path / f"stories.txt{suffix}"
    file.write_bytes(pack("<|endoftext|>".join(stories).encode()))
    model, tokenizer = load(demo.path())
    [header] = write_token_file(read_documents(file), tmp_path / "stories.tokens", tokenizer)
    tokens = open_token_file(tmp_path / "stories.tokens").tokens
    length = 8 if windows else len(tokens)
    if windows:
        tokens = tokens[: 2 * length + 1]
    want = measure_perplexity(model, tokens, header.size_bytes, length=length)
    flags = ["--data", str(file), "--sequence-length", str(length), "--no-carry-state", *windows]
    got = metrics(capsys, *flags)
    assert got["tokens"] == want.tokens
    assert got["perplexity"] == pytest.approx(want.perplexity, rel=1e-5)
    end = tokenizer.eos_token_id
    predicted = tokenizer.decode([token for token in tokens[1:].tolist() if token != end])
    assert got["size_bytes"] == len(predicted.encode())
    if not windows:
        first = tokenizer.decode(tokens[:1].tolist())
        assert got["size_bytes"] == header.size_bytes - len(first.encode())


def test_windows_of_the_length_of_the_model(tmp_path: Path, file: Path, capsys: Captured) -> None:
    model = tiny_transformer(vocab_size=640, max_position_embeddings=16, linears=None)
    save_model(tmp_path / "m", model, GOLDENS / "tokenizer_spm")
    flags = ["--model", str(tmp_path / "m"), "--data", str(file)]
    got = metrics(capsys, *flags)
    assert got["sequence_length"] == 16
    assert got == {
        **got,
        **{
            key: value
            for key, value in metrics(capsys, *flags, "--sequence-length", "16").items()
            if key not in ("tokens_per_second", "peak_memory")
        },
    }
    assert metrics(capsys, *flags, "--num-samples", "2")["tokens"] == 32
    assert main(["perplexity", *flags, "--carry-state"]) == 2
    error = capsys.readouterr().err
    assert "--carry-state must be False for a text of" in error
    assert "since the model was made for 16" in error
    assert main(["perplexity", *flags]) == 0
    assert "State: empty at the start of windows of 16 tokens\n" in capsys.readouterr().out


def test_some_windows(folder: Path, file: Path, capsys: Captured) -> None:
    flags = ["--model", str(folder), "--data-path", str(file), "--sequence-length", "8"]
    assert main(["perplexity", *flags, "--num-samples", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Perplexity: ") and " ± " in lines[0]
    assert lines[2].startswith("Predicted: 24 tokens, ")
    _, tokenizer = load(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False, parse_special=False)[:24]
    assert lines[2].endswith(f" {len(tokenizer.decode(ids).encode())} bytes")


def test_too_long_files(tmp_path: Path, capsys: Captured) -> None:
    with open(tmp_path / "long", "wb") as file:
        file.truncate(32_000_001)
    assert main(["perplexity", "--data-path", str(tmp_path / "long")]) == 2
    assert "more than the 32,000,000 that such a file may have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        ("A text.".encode("utf-16"), "cannot be read: it must be UTF-8 but is UTF-16."),
        (b"\xef\xbb\xbfa", "must hold at least two tokens but holds 1"),
        (b"a", "must hold at least two tokens"),
    ],
)
def test_unfit_files(content: bytes | None, reason: str, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert main(["perplexity", "--data", str(file)]) == 2
    shown = capsys.readouterr()
    assert reason in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""

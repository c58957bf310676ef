"""Folders of token files: their content, the held-out part, the same bytes from several processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from mlx_mmfree.training.corpus import tokenize as module
from mlx_mmfree.training.corpus.tokenize import (
    Header,
    find_sources,
    is_held_out,
    open_token_file,
    tokenize,
)
from tests.hub.checkpoints import GOLDENS
from tests.training.conftest import WORDS

TOKENIZER = GOLDENS / "tokenizer_bpe"


def _documents(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(count)]


def _write(folder: Path, documents: list[str], files: int = 1) -> Path:
    folder.mkdir()
    for n in range(files):
        lines = [json.dumps({"text": text}) for text in documents[n::files]]
        (folder / f"{n}.jsonl").write_text("\n".join(lines))
    return folder


def _tokenize(data: Path, output: Path, **options: Any) -> dict[str, Header]:
    chosen = {"tokenizer": TOKENIZER} | options
    return tokenize(find_sources([str(data)]), output, **chosen)


def _texts(file: Path) -> list[str]:
    opened = open_token_file(file)
    tokenizer = Tokenizer.from_folder(file.parent / "tokenizer")
    tokens = opened.tokens[:]
    ends = np.flatnonzero(tokens == opened.header.end_of_text)
    assert ends[-1] == len(tokens) - 1
    texts = [tokenizer.decode(ids[:-1]) for ids in np.split(tokens, ends + 1)[:-1]]
    assert opened.header.documents == len(texts)
    assert opened.header.size_bytes == sum(len(text.encode()) for text in texts)
    return texts


def test_the_documents_are_there_in_order(tmp_path: Path) -> None:
    documents = [*_documents(50), "é 字 <|eot_id|> x"]
    headers = _tokenize(_write(tmp_path / "data", documents), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "tokenizer",
        "train.tokens",
    ]
    assert list(headers) == ["train.tokens"]
    assert _texts(tmp_path / "out/train.tokens") == documents


def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _write(tmp_path / "data", _documents(400), files=3)
    monkeypatch.setattr("mlx_mmfree.tokenizer.documents._BATCH_CHARACTERS", 1000)
    for processes in (1, 2):
        _tokenize(data, tmp_path / str(processes), held_out=0.2, processes=processes)
    for name in ("train.tokens", "valid.tokens"):
        one, two = (tmp_path / folder / name for folder in "12")
        assert one.read_bytes() == two.read_bytes()


def test_held_out_documents_are_the_same_in_any_order_and_number_of_files(tmp_path: Path) -> None:
    documents = sorted(set(_documents(300)))
    found = []
    for n, given in enumerate((documents, documents[::-1] + documents[:50])):
        data = _write(tmp_path / f"data{n}", given, files=1 + n)
        _tokenize(data, tmp_path / f"out{n}", held_out=0.3)
        sides = [set(_texts(tmp_path / f"out{n}/{name}.tokens")) for name in ("train", "valid")]
        assert sides[0] | sides[1] == set(documents) and not sides[0] & sides[1]
        assert 0.2 < len(sides[1]) / len(documents) < 0.4
        found.append(sides[1])
    assert found[0] == found[1]
    more = {document for document in documents if is_held_out(document, 0.5)}
    assert found[0] < more


def test_a_vocabulary_can_be_trained_on_the_corpus(tmp_path: Path) -> None:
    data = _write(tmp_path / "data", _documents(200))
    headers = _tokenize(data, tmp_path / "out", tokenizer=None, vocab_size=300, held_out=0.1)
    assert {header.vocab_size for header in headers.values()} == {300}
    assert len(_texts(tmp_path / "out/train.tokens")) > 100


def test_the_vocabulary_sees_only_a_part_of_a_large_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = _write(tmp_path / "data", _documents(200))
    size = sum(source.size_bytes for source in find_sources([str(data)]))
    monkeypatch.setattr(module, "_VOCABULARY_BYTES", size // 2)
    seen: list[str] = []
    monkeypatch.setattr(module, "train_vocabulary", lambda texts, *_: seen.extend(texts))
    with pytest.raises(Exception, match="must hold 'tokenizer"):
        _tokenize(data, tmp_path / "out", tokenizer=None, vocab_size=300, held_out=0.1)
    assert 60 < len(seen) < 120
    assert not any(is_held_out(text, 0.1) for text in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1.0}, "'valid_fraction' must be at least 0 and below 1 but got 1.0"),
        ({"held_out": 1e-9}, "holds out none of 5 with 1e-09"),
        ({"vocab_size": 300}, "one of 'tokenizer' and 'vocab_size' must be given"),
    ],
)
def test_mistakes_leave_nothing(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    data = _write(tmp_path / "data", _documents(5))
    with pytest.raises(TrainingError, match=message):
        _tokenize(data, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_with_files_is_not_touched(tmp_path: Path) -> None:
    data = _write(tmp_path / "data", _documents(5))
    with pytest.raises(TrainingError, match="'output' must be a new or empty folder"):
        _tokenize(data, data)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(TrainingError, match="must hold a document"):
        tokenize(find_sources([str(tmp_path / "empty.txt")]), tmp_path / "out", TOKENIZER)
    assert not (tmp_path / "out").exists()


KILLED = """
def main():
    import os, signal, sys
    from multiprocessing import active_children
    from pathlib import Path
    from mlx_mmfree.tokenizer import documents
    from mlx_mmfree.training.corpus import tokenize as module
    from mlx_mmfree.training.corpus.tokenize import find_sources

    encode = module.encode_documents

    def ends(*arguments):
        for number, part in enumerate(encode(*arguments)):
            if number == 3:
                print(*(child.pid for child in active_children()), flush=True)
                os.kill(os.getpid(), getattr(signal, sys.argv[4]))
            yield part

    documents._BATCH_CHARACTERS = 1000
    module.encode_documents = ends
    data, output, tokenizer = map(Path, sys.argv[1:4])
    module.tokenize(find_sources([str(data)]), output, tokenizer, processes=2)

# the processes that it starts import this file
if __name__ == "__main__":
    main()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGINT"])
def test_a_stop_leaves_no_process_and_the_next_start_begins_anew(tmp_path: Path, kind: str) -> None:
    documents = _documents(400)
    data = _write(tmp_path / "data", documents)
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, "killed.py", data, tmp_path / "out", TOKENIZER, kind]
    finished = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == -getattr(signal, kind), finished.stderr
    children = [int(number) for number in finished.stdout.split()]
    assert len(children) == 2
    deadline = time.monotonic() + 120
    while any(_is_alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "out").exists()
    left = list(tmp_path.glob(".out.*"))
    assert len(left) == (kind == "SIGKILL")
    _tokenize(data, tmp_path / "out")
    assert _texts(tmp_path / "out/train.tokens") == documents
    assert not list(tmp_path.glob(".out.*"))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    # a process that nobody has waited for is dead too
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")

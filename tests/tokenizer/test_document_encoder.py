"""Documents that are encoded in several processes."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from mlx_mmfree.errors import CheckpointError
from mlx_mmfree.tokenizer import documents as document_encoder
from mlx_mmfree.tokenizer.documents import encode_documents
from mlx_mmfree.tokenizer.tokenizer import Tokenizer
from tests.hub.checkpoints import GOLDENS

FOLDERS = [GOLDENS / "tokenizer_bpe", GOLDENS / "tokenizer_spm"]
TEXTS = ["the dog", "", "é 字", "<|eot_id|> </s>"] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ids_are_those_of_the_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_encoder, "_BATCH_CHARACTERS", 20)
    tokenizer = Tokenizer.from_folder(folder)
    want = [[*tokenizer.encode(text, False, parse_special=False), 1] for text in TEXTS]
    for processes in (1, 2):
        found = list(encode_documents(TEXTS, tokenizer, 1, processes))
        assert len(found) > 3
        assert [text for part in found for text in part.documents] == TEXTS
        assert [n for part in found for n in part.lengths] == list(map(len, want))
        assert [n for part in found for n in part.ids] == [n for ids in want for n in ids]


def test_documents_are_taken_only_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_encoder, "_BATCH_CHARACTERS", 1)
    taken: list[int] = []

    def documents() -> Iterator[str]:
        for number in range(100):
            taken.append(number)
            yield "a"

    encoded = encode_documents(documents(), Tokenizer.from_folder(FOLDERS[0]), 1, processes=2)
    next(encoded)
    assert len(taken) < 10
    encoded.close()


def test_a_process_that_is_killed_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_encoder, "_BATCH_CHARACTERS", 1)
    pools = []

    class Pool(document_encoder.ProcessPoolExecutor):
        def __init__(self, *arguments: object, **options: object):
            super().__init__(*arguments, **options)
            pools.append(self)

    monkeypatch.setattr(document_encoder, "ProcessPoolExecutor", Pool)
    # without an end, since the process that is left goes on until the pool has seen the death
    encoded = encode_documents(repeat("a"), Tokenizer.from_folder(FOLDERS[0]), 1, processes=2)
    next(encoded)
    os.kill(next(iter(pools[0]._processes)), signal.SIGKILL)
    with pytest.raises(CheckpointError, match="a process that encodes texts was killed"):
        deque(encoded, maxlen=0)

"""Work on many documents: a vocabulary is trained on them, and they are encoded."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _BPETokenizer

from ..errors import CheckpointError
from ..files.checkpoint_files import VOCABULARY_FILES
from ..files.writing import new_file
from .from_gguf import LLAMA3_PATTERN
from .tokenizer import Tokenizer
from .vocabulary import MAX_VOCABULARY_BYTES, read_limited


def train_vocabulary(
    documents: Iterable[str],
    vocab_size: int,
    folder: Path,
    *,
    end_of_text: str = "<|endoftext|>",
    mask_token: str | None = None,
) -> None:
    """Trains a byte-level BPE vocabulary (Sennrich et al., arXiv 1508.07909).

    Texts are split before merging as for Llama 3, which llama.cpp knows by name. Writes
    `tokenizer.json` and `tokenizer_config.json` into `folder`.

    Args:
        documents: The texts to learn merges from.
        vocab_size: The number of tokens, including the 256 bytes and the special ones. Fewer are made
            if the texts have no more pairs to merge.
        folder: The folder for the files, which is made if needed.
        end_of_text: The special token between documents. Its id is 0.
        mask_token: A special token that stands for one that is left out, together with the space before
            it; `None`: there is none. Its id is 1.
    """
    tokenizer = _BPETokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = [end_of_text]
    config = {"eos_token": end_of_text, "clean_up_tokenization_spaces": False}
    if mask_token is not None:
        special.append(AddedToken(mask_token, lstrip=True, special=True))
        config["mask_token"] = mask_token
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    with new_file(folder / "tokenizer.json") as file:
        tokenizer.save(str(file))
    with new_file(folder / "tokenizer_config.json") as file:
        file.write_text(json.dumps(config, indent=2) + "\n")


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of the vocabulary file and the special tokens, which decide the ids of a text.

    Raises:
        CheckpointError: The vocabulary file cannot be read any more.
    """
    files = (tokenizer.folder / name for name in VOCABULARY_FILES)
    file = next((file for file in files if file.exists()), None)
    # what reads bytes has no file
    content = b"bytes" if file is None else read_limited(file, MAX_VOCABULARY_BYTES)
    digest = hashlib.sha256(content)
    digest.update(json.dumps(sorted(tokenizer.special_tokens.items())).encode())
    return digest.hexdigest()


_BATCH_CHARACTERS = 500_000
_WAITING_BATCHES = 2

_encoders: list["_Encoder"] = []


class EncodedDocuments(NamedTuple):
    """Some documents and their ids.

    Attributes:
        documents: The texts.
        ids: The ids of all of them, each followed by the end, uint32 `(n,)`.
        lengths: The number of ids of each document with its end, int64 `(documents,)`.
    """

    documents: list[str]
    ids: np.ndarray
    lengths: np.ndarray


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, end_of_text: int, processes: int = 1
) -> Generator[EncodedDocuments, None, None]:
    """Encodes documents as plain text, many at a time.

    The ids do not depend on the number of processes. Only a few documents are held at a time. A program
    that asks for several processes keeps what it does at its start below `if __name__ == "__main__":`,
    since each process imports it.

    Args:
        documents: The texts.
        tokenizer: A tokenizer that was read from a folder.
        end_of_text: The id to put after each document.
        processes: Number of processes; with 1, this process works alone.

    Raises:
        CheckpointError: The tokenizer cannot encode a text, or a process was killed.
    """
    batches = _batches(documents)
    if processes == 1:
        yield from map(_Encoder(tokenizer, end_of_text), batches)
        return
    pool = ProcessPoolExecutor(
        processes,
        # a forked process would share the threads' locks of this one
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(tokenizer.folder, end_of_text),
    )
    waiting: deque[Future[EncodedDocuments]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode, batch))
            if len(waiting) > _WAITING_BATCHES * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            "[tokenizer] a process that encodes texts was killed, perhaps because memory ran out. Try "
            "again with fewer processes."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Encoder:
    def __init__(self, tokenizer: Tokenizer, end_of_text: int):
        self._tokenizer = tokenizer
        self._end_of_text = end_of_text

    def __call__(self, documents: list[str]) -> EncodedDocuments:
        parts, lengths = [], []
        for document in documents:
            ids = self._tokenizer.encode(document, add_special_tokens=False, parse_special=False)
            ids.append(self._end_of_text)
            parts.append(np.array(ids, np.uint32))
            lengths.append(len(ids))
        return EncodedDocuments(documents, np.concatenate(parts), np.array(lengths))


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start(folder: Path, end_of_text: int) -> None:
    """Prepares a process of the pool."""
    # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoders[:] = [_Encoder(Tokenizer.from_folder(folder), end_of_text)]


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    with suppress(OSError):
        if parent is not None:
            parent.join()
    os._exit(1)


def _encode(documents: list[str]) -> EncodedDocuments:
    return _encoders[0](documents)

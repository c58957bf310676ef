"""Text files as streams of token ids, and random windows of them as batches."""

import lzma
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import TrainingError
from ..files.opening import open_file

END_OF_TEXT = "<|endoftext|>"

# text compresses to about a third of its size, and repeated lines to less
_MOST_TIMES_LARGER = 100
_SMALL_BYTES = 1_000_000
_PIECE_BYTES = 16_000_000


def read_documents(path: Path) -> list[str]:
    """The documents of a UTF-8 text file, plain or `.xz`, separated by lines `<|endoftext|>`.

    Raises:
        TrainingError: The file cannot be read, is not UTF-8, or decompresses to far too much.
    """
    try:
        with open_file(path) as stream:
            raw = _decompressed(stream) if path.suffix == ".xz" else stream.read()
        text = raw.decode()
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TrainingError(
            f"[data] '{path}' must be a readable UTF-8 text file: {error}"
        ) from error
    documents = [document.strip("\n") for document in text.split(END_OF_TEXT)]
    return [document for document in documents if document]


def _decompressed(stream: BinaryIO) -> bytes:
    most = _SMALL_BYTES + _MOST_TIMES_LARGER * os.fstat(stream.fileno()).st_size
    raw = bytearray()
    with lzma.open(stream) as unpacked:
        while piece := unpacked.read(_PIECE_BYTES):
            raw += piece
            if len(raw) > most:
                raise TrainingError(
                    f"[data] '{stream.name}' must be compressed text, which grows at most "
                    f"{_MOST_TIMES_LARGER} times, but it grows to over {most:,} bytes. If you trust the "
                    "file, decompress it yourself."
                )
    return bytes(raw)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of one file, with an end-of-text token after each document.

    Attributes:
        tokens: Token ids, int32 `(n,)`.
        size_bytes: Number of UTF-8 bytes of the documents.
    """

    tokens: np.ndarray
    size_bytes: int


def tokenize(path: Path, encode: Callable[[str], list[int]], end_of_text: int) -> TokenStream:
    """Reads and encodes one file; `encode` maps a text to token ids."""
    ids: list[int] = []
    size_bytes = 0
    for document in read_documents(path):
        ids.extend(encode(document))
        ids.append(end_of_text)
        size_bytes += len(document.encode())
    return TokenStream(np.array(ids, np.int32), size_bytes)


@dataclass(frozen=True)
class Stage:
    """A part of a training run with its own mixture of files.

    Attributes:
        until: Fraction of all steps at which the stage ends.
        weights: Weight of each file, by its path. A file is drawn in proportion to weight times size.
    """

    until: float
    weights: Mapping[str, float]


class Mixture:
    """Random windows of several token streams. A batch depends only on the seed and the step.

    Args:
        streams: The streams, by name.
        stages: The stages in order. The last ends at 1.
        seed: Seed of the random draws.
    """

    def __init__(self, streams: Mapping[str, TokenStream], stages: Sequence[Stage], seed: int):
        self._streams = streams
        self._stages = stages
        self._seed = seed

    def batch(self, step: int, total_steps: int, batch_size: int, length: int) -> np.ndarray:
        """The token ids of one step, int32 `(batch_size, length + 1)`."""
        progress = step / total_steps
        stage = next(s for s in self._stages if progress < s.until)
        names = list(stage.weights)
        sizes = np.array([len(self._streams[n].tokens) * stage.weights[n] for n in names])
        random = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        rows = []
        for name in random.choice(len(names), batch_size, p=sizes / sizes.sum()):
            tokens = self._streams[names[name]].tokens
            start = random.integers(0, len(tokens) - length)
            rows.append(tokens[start : start + length + 1])
        return np.stack(rows)

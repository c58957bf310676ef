"""Text files as streams of token ids, and random batches of them."""

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

# text is stored in a third of its bytes or so, lists of equal lines in less
_MOST_TIMES_LARGER = 100
_SMALL_BYTES = 1_000_000
_PIECE_BYTES = 16_000_000


def read_documents(path: Path) -> list[str]:
    """The documents of a UTF-8 text file, plain or `.xz`, separated by lines `<|endoftext|>`.

    Raises:
        TrainingError: The file cannot be read, is no text, or is small but stores very much.
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
                    f"[data] '{stream.name}' must be text, which takes at most {_MOST_TIMES_LARGER} "
                    f"times the room once decompressed, but takes over {most} bytes. Decompress it "
                    "yourself if it is sound."
                )
    return bytes(raw)


@dataclass(frozen=True)
class TokenStream:
    """The tokens of one file, an end-of-text token after each document.

    Attributes:
        tokens: Ids, int32.
        size_bytes: UTF-8 bytes of the documents.
    """

    tokens: np.ndarray
    size_bytes: int


def tokenize(path: Path, encode: Callable[[str], list[int]], end_of_text: int) -> TokenStream:
    """Reads and encodes one file."""
    ids: list[int] = []
    size_bytes = 0
    for document in read_documents(path):
        ids.extend(encode(document))
        ids.append(end_of_text)
        size_bytes += len(document.encode())
    return TokenStream(np.array(ids, np.int32), size_bytes)


@dataclass(frozen=True)
class Stage:
    """A part of the training run with its own mixture.

    Attributes:
        until: Fraction of all steps at which the stage ends.
        weights: How many times each file counts, by its path.
    """

    until: float
    weights: Mapping[str, float]


class Mixture:
    """Random windows of several token streams; a batch depends on the seed and the step alone.

    Args:
        streams: The streams by name.
        stages: Stages in order; the last ends at 1.
        seed: Seed of the draws.
    """

    def __init__(self, streams: Mapping[str, TokenStream], stages: Sequence[Stage], seed: int):
        self._streams = streams
        self._stages = stages
        self._seed = seed

    def batch(self, step: int, total_steps: int, batch_size: int, length: int) -> np.ndarray:
        """Ids of shape `(batch_size, length + 1)` for one step."""
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

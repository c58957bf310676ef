"""Writes token files."""

import hashlib
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from ...errors import TrainingError
from .token_file import HEADER_BYTES, Header, id_dtype


def id_bits(vocab_size: int) -> int:
    """The least width of ids below a number: 16 or 32."""
    return 16 if vocab_size <= 2**16 else 32


class TokenFileWriter:
    """Writes one token file from the ids of documents in their order.

    Args:
        stream: A file at its beginning.
        vocab_size, end_of_text, tokenizer: As in the header.
    """

    def __init__(self, stream: BinaryIO, vocab_size: int, end_of_text: int, tokenizer: str):
        self._stream = stream
        self._vocab_size = vocab_size
        self._end_of_text = end_of_text
        self._tokenizer = tokenizer
        self._bits = id_bits(vocab_size)
        self._digest = hashlib.sha256()
        self.tokens = self.documents = self.size_bytes = 0
        stream.write(bytes(HEADER_BYTES))

    def add(self, ids: np.ndarray, documents: Sequence[str]) -> None:
        """Appends the ids of some documents, each followed by its end."""
        raw = ids.astype(id_dtype(self._bits), copy=False).tobytes()
        self._stream.write(raw)
        self._digest.update(raw)
        self.tokens += len(ids)
        self.documents += len(documents)
        self.size_bytes += sum(len(document.encode()) for document in documents)

    def finish(self) -> Header:
        """Writes the header. Until then the file is no token file.

        Raises:
            TrainingError: There are no documents.
        """
        if not self.documents:
            raise TrainingError("[data] a token file must hold a document but there is none.")
        header = Header(
            bits=self._bits,
            tokens=self.tokens,
            documents=self.documents,
            size_bytes=self.size_bytes,
            vocab_size=self._vocab_size,
            end_of_text=self._end_of_text,
            tokenizer=self._tokenizer,
            checksum=self._digest.hexdigest(),
        )
        self._stream.seek(0)
        self._stream.write(header.to_bytes())
        return header

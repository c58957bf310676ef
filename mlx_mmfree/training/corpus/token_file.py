"""Files of tokens: the token ids of a corpus, read from the disk as they are needed.

A file begins with a header of 4,096 bytes: `MMFTOKEN`, a JSON object and spaces. The ids of all
documents follow in order, as little-endian numbers of 16 or 32 bits, with the end-of-text token after
each document.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from tqdm import tqdm

from ...errors import TrainingError
from ...files.reading import open_file, parse_json
from ...files.stored_array import StoredArray


def byte_bar(size_bytes: int, name: str) -> "tqdm[NoReturn]":
    """A bar that appears after a second, and only on a terminal."""
    # disable=None shows no bar where stderr is not a terminal
    return tqdm(total=size_bytes, unit="B", unit_scale=True, desc=name, disable=None, delay=1)


SUFFIX = ".tokens"
HEADER_BYTES = 4096
_MAGIC = b"MMFTOKEN"
_VERSION = 1
_PIECE_BYTES = 4_000_000
_MAX_VOCABULARY = 2**31
_DIGEST_LETTERS = 64


@dataclass(frozen=True)
class Header:
    """What a token file says of itself.

    Attributes:
        bits: 16 or 32, the width of an id.
        tokens: Number of ids.
        documents: Number of documents.
        size_bytes: Number of UTF-8 bytes of the documents.
        vocab_size: All ids are below it.
        end_of_text: The id that stands after each document.
        tokenizer: Digest of the tokenizer that made the ids.
        checksum: SHA-256 of the ids as they are stored.
        version: Version of the format.
    """

    bits: int
    tokens: int
    documents: int
    size_bytes: int
    vocab_size: int
    end_of_text: int
    tokenizer: str
    checksum: str
    version: int = _VERSION

    def to_bytes(self) -> bytes:
        """The header as it stands in the file."""
        return (_MAGIC + json.dumps(asdict(self)).encode()).ljust(HEADER_BYTES)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The stored type of an id."""
        return id_dtype(self.bits)


@dataclass(frozen=True)
class TokenFile:
    """An open token file.

    Attributes:
        header: What it says of itself.
        tokens: The ids, uint16 or uint32 `(n,)`, which are read when they are asked for. Where the file
            has changed since it was opened, this raises a `TrainingError`.
    """

    header: Header
    tokens: StoredArray


def id_dtype(bits: int) -> np.dtype[Any]:
    """The type of ids of a width."""
    return np.dtype(f"<u{bits // 8}")


def open_token_file(path: Path) -> TokenFile:
    """Opens a token file after comparing all of it with its header.

    Raises:
        TrainingError: The file cannot be read, is none, or is damaged.
    """

    def check(stream: BufferedReader) -> None:
        stream.seek(HEADER_BYTES)
        _check_ids(stream, header, path)

    def changed(why: str) -> TrainingError:
        return TrainingError(
            f"[data] '{path}' must stay as it is while it is read, but was changed: {why}. Write it "
            "again with `mmfree tokenize` and repeat the command."
        )

    with _opened(path) as (stream, header):
        shape = (header.tokens,)
        tokens = StoredArray(stream, header.dtype, shape, HEADER_BYTES, check, changed)
        check(stream)
    return TokenFile(header, tokens)


def read_token_header(path: Path) -> Header:
    """What a token file says of itself; its ids are not read.

    Raises:
        TrainingError: The file cannot be read, is none, or is of another size than it says.
    """
    with _opened(path) as (_, header):
        return header


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BufferedReader, Header]]:
    try:
        with open_file(path) as stream:
            yield stream, _read_header(stream)
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"[data] '{path}' must be a token file: {error}. Write it again with `mmfree tokenize`."
        ) from error


def _read_header(stream: BufferedReader) -> Header:
    raw = stream.read(HEADER_BYTES)
    if not raw.startswith(_MAGIC) or len(raw) < HEADER_BYTES:
        raise ValueError(f"it must begin with {_MAGIC.decode()} and a whole header but does not")
    try:
        values = parse_json(raw[len(_MAGIC) :])
    except ValueError as error:
        raise ValueError(f"its header {error}") from error
    header = _header(values)
    size = os.fstat(stream.fileno()).st_size
    wanted = HEADER_BYTES + header.tokens * header.dtype.itemsize
    if size != wanted:
        raise ValueError(f"it must have {wanted:,} bytes for its ids but has {size:,}")
    return header


def _header(values: Any) -> Header:
    """The header that a JSON value describes."""
    kinds = {field.name: field.type for field in fields(Header)}
    if not isinstance(values, Mapping) or values.keys() != kinds.keys():
        raise ValueError(f"its header must hold {', '.join(kinds)} and nothing else")
    for name, value in values.items():
        if type(value) is not kinds[name]:
            raise ValueError(f"'{name}' in its header must not be {value!r:.60}")
    most = {
        "tokens": 2**48,
        "documents": values["tokens"],
        "size_bytes": 2**63,
        "vocab_size": min(_MAX_VOCABULARY, 2 ** values["bits"])
        if values["bits"] in (16, 32)
        else 0,
        "end_of_text": values["vocab_size"] - 1,
    }
    for name, limit in most.items():
        least = 0 if name == "end_of_text" else 1
        if not least <= values[name] <= limit:
            raise ValueError(
                f"'{name}' in its header must be from {least} to {limit} but is {values[name]}"
            )
    for name in ("tokenizer", "checksum"):
        if len(values[name]) != _DIGEST_LETTERS or not values[name].isalnum():
            raise ValueError(
                f"'{name}' in its header must be a SHA-256 but is {values[name]!r:.80}"
            )
    if values["version"] != _VERSION:
        raise ValueError(f"its version must be {_VERSION} but is {values['version']}")
    return Header(**values)


def _check_ids(stream: BufferedReader, header: Header, path: Path) -> None:
    digest = hashlib.sha256()
    left = header.tokens * header.dtype.itemsize
    with byte_bar(left, f"checking {path.name}") as bar:
        while left and (piece := stream.read(min(_PIECE_BYTES, left))):
            digest.update(piece)
            largest = int(np.frombuffer(piece, header.dtype).max())
            if largest >= header.vocab_size:
                raise ValueError(
                    f"its ids must be below 'vocab_size', {header.vocab_size}, but one is {largest}"
                )
            left -= len(piece)
            bar.update(len(piece))
    if left or digest.hexdigest() != header.checksum:
        raise ValueError("its ids must have the checksum in its header but are damaged")


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

"""Token files: the token ids of a corpus, read from the disk as they are needed.

A file begins with a header of 4,096 bytes: `MMFTOKEN`, a JSON object and spaces. The ids of all
documents follow in order, as little-endian numbers of 16 or 32 bits, with the end-of-text token after
each document.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TrainingError
from ...files.reading import open_file, parse_json
from ...files.stored_array import StoredArray
from .byte_bar import byte_bar

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

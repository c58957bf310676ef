"""Token files, which hold the ids of a corpus, and how documents become them.

A file begins with a header of 4,096 bytes: `MMFTOKEN`, a JSON object and spaces. The ids of all
documents follow in order, as little-endian numbers of 16 or 32 bits, with the end-of-text token after
each document. They are read from the disk as they are needed. A corpus becomes a folder of such files,
and one text one file.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatch
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import TrainingError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.reading import check_link, expanded, open_file, parse_json, tokenizer_files
from ...files.stored_array import StoredArray
from ...files.writing import new_folder
from ...hub.checkpoint.save import copy_files
from ...hub.remote.datasets import dataset_files
from ...platform.progress import Progress
from ...tokenizer.documents import encode_documents, tokenizer_digest, train_vocabulary
from ...tokenizer.tokenizer import Tokenizer
from .documents import (
    COMPRESSED,
    END_OF_TEXT,
    FORMATS,
    TEXT_COLUMN,
    OnBytes,
    file_format,
    read_documents,
)


def byte_bar(size_bytes: int, name: str) -> Progress:
    """The progress of reading bytes, as a bar that appears after a second."""
    return Progress(name, size_bytes, "B", delay=1)


SUFFIX = ".tokens"
HEADER_BYTES = 4096
_MAGIC = b"MMFTOKEN"
_VERSION = 1
_CHUNK_BYTES = 4_000_000
_MAX_VOCABULARY = 2**31
_DIGEST_LETTERS = 64


@dataclass(frozen=True)
class Header:
    """The description of a token file.

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
        """The header as bytes of the file."""
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
    """The description of a token file; its ids are not read.

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
        while left and (chunk := stream.read(min(_CHUNK_BYTES, left))):
            digest.update(chunk)
            largest = int(np.frombuffer(chunk, header.dtype).max())
            if largest >= header.vocab_size:
                raise ValueError(
                    f"its ids must be below 'vocab_size', {header.vocab_size}, but one is {largest}"
                )
            left -= len(chunk)
            bar.update(len(chunk))
    if left or digest.hexdigest() != header.checksum:
        raise ValueError("its ids must have the checksum in its header but are damaged")


def id_bits(vocab_size: int) -> int:
    """The least width of ids below a number: 16 or 32."""
    return 16 if vocab_size <= 2**16 else 32


class TokenFileWriter:
    """Writes one token file from the ids of documents in their order.

    Args:
        stream: A file at its start.
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


def is_held_out(document: str, fraction: float) -> bool:
    """Returns whether a document belongs to the held-out part.

    A hash of its text alone decides. So a document stays on its side whatever stands before it, in
    however many files, and copies of it stay together. A larger fraction only adds documents.

    Args:
        document: The text.
        fraction: About what part of all documents is held out.
    """
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


READABLE = tuple(
    f"*{kind}{packed}"
    for kind in FORMATS
    for packed in ("", *COMPRESSED)
    if (kind, packed) not in ((FORMATS[-1], packing) for packing in COMPRESSED)
)
"""Patterns of the names of files that a folder or a dataset may hold."""


@dataclass(frozen=True)
class SourceFile:
    """A file with documents.

    Attributes:
        name: Its name, for messages.
        size_bytes: Its size on the disk.
        path: Gives the file itself, and downloads it first if needed.
    """

    name: str
    size_bytes: int
    path: Callable[[], Path]


def find_sources(
    data: Sequence[str], include: Collection[str] = (), revision: str | None = None
) -> list[SourceFile]:
    """The files with documents, in order: folder by folder, each sorted by name.

    Args:
        data: Files, folders with `.txt`, `.jsonl` and `.parquet` files at any depth, or datasets
            `owner/name` of the Hub.
        include: Patterns such as `data/train-*` that a file of a folder or a dataset must match. Without
            any, all files are taken, which must then be of one kind.
        revision: Branch, tag or commit of the datasets.

    Raises:
        TrainingError: There is nothing of that name, nothing to read in it, or it holds files of
            several kinds.
        DownloadError: The Hub does not hand out a dataset.
    """
    found = []
    for name in data:
        path = expanded(name)
        if path.is_dir():
            files = _folder_files(path)
        elif path.exists():
            found.append(SourceFile(str(path), path.stat().st_size, partial(Path, path)))
            continue
        else:
            listed = dataset_files(name, revision, tuple(include) or READABLE)
            files = [SourceFile(file.name, file.size_bytes, file.fetch) for file in listed]
        found += _chosen(files, name, include)
    return found


def read_sources(
    sources: Iterable[SourceFile], column: str, on_bytes: OnBytes | None = None
) -> Iterator[str]:
    """The documents of all files in order. Of a dataset, each file is fetched when it is needed.

    Args:
        sources: The files.
        column, on_bytes: As for `read_documents`.
    """
    for source in sources:
        yield from read_documents(source.path(), column, on_bytes)


def _folder_files(folder: Path) -> list[SourceFile]:
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(parent, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if not path.name.startswith(".") and any(fnmatch(name, kind) for kind in READABLE):
                try:
                    check_link(path)
                    size = path.stat().st_size
                except OSError as error:
                    raise TrainingError(f"[data] '{path}' cannot be read: {error}.") from error
                found.append(SourceFile(name, size, partial(Path, path)))
    return sorted(found, key=lambda file: file.name)


def _chosen(files: list[SourceFile], name: str, include: Collection[str]) -> list[SourceFile]:
    chosen = [
        file
        for file in files
        if not include or any(fnmatch(file.name, pattern) for pattern in include)
    ]
    if not chosen:
        wanted = f"a file that matches {', '.join(include)}" if include else "such a file"
        present = ", ".join(file.name for file in files[:8]) or "no file to read"
        raise TrainingError(
            f"[data] '{name}' must hold {' or '.join(FORMATS)} files, and {wanted}, but holds {present}."
        )
    kinds = sorted({file_format(file.name) for file in chosen})
    if len(kinds) > 1 and not include:
        raise TrainingError(
            f"[data] '{name}' must hold files of one kind but holds {' and '.join(kinds)}, which may "
            f"repeat the same texts. Choose with 'include', such as '*{kinds[0]}'."
        )
    return chosen


TRAINING_FILE, HELD_OUT_FILE = f"train{SUFFIX}", f"valid{SUFFIX}"
TOKENIZER_FOLDER = "tokenizer"
_VOCABULARY_BYTES = 200_000_000


def tokenize(
    sources: Sequence[SourceFile],
    output: Path,
    tokenizer: Path | None = None,
    *,
    vocab_size: int | None = None,
    text_column: str = TEXT_COLUMN,
    held_out: float = 0.0,
    processes: int = 1,
) -> dict[str, Header]:
    """Writes a folder with the token ids of a corpus, which is read file by file and never held.

    The folder gets `train.tokens`, `valid.tokens` if documents are held out, and `tokenizer/`. It
    appears when it is complete. Its content depends on neither the number of processes nor the time.

    Args:
        sources: The files of the corpus.
        output: A new or empty folder.
        tokenizer: Folder with the tokenizer.
        vocab_size: Train a vocabulary of this size instead, on about 200 MB of the corpus.
        text_column: The key or column of the text in JSON lines and parquet.
        held_out: About what part of the documents goes to `valid.tokens`, chosen by a hash of their
            text.
        processes: Number of processes.

    Returns:
        The header of each token file by its name.

    Raises:
        TrainingError: A file cannot be read, the folder is not empty, or a part has no documents.
        CheckpointError: The tokenizer cannot be read, or cannot encode a text.
        OSError: The folder cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise TrainingError(
            f"[tokenize] 'output' must be a new or empty folder but '{output}' is not. Choose another "
            "name, or remove it."
        )
    if not 0 <= held_out < 1:
        raise TrainingError(
            f"[tokenize] 'valid_fraction' must be at least 0 and below 1 but got {held_out}."
        )
    if (tokenizer is None) is (vocab_size is None):
        raise TrainingError(
            "[tokenize] one of 'tokenizer' and 'vocab_size' must be given, and only one."
        )
    size_bytes = sum(source.size_bytes for source in sources)
    with new_folder(output, needed_bytes=size_bytes // 2) as folder:
        own = folder / TOKENIZER_FOLDER
        if vocab_size is None:
            own.mkdir()
            copied = tokenizer_files(Path(str(tokenizer)))
            copied.pop(CONFIG_FILE, None)
            copy_files(copied, own)
        else:
            share = min(1.0, _VOCABULARY_BYTES / max(size_bytes, 1)) * (1 - held_out)
            with byte_bar(size_bytes, "vocabulary") as bar:
                documents = read_sources(sources, text_column, bar.update)
                sample = _between(documents, held_out, held_out + share)
                train_vocabulary(sample, vocab_size, own)
        with byte_bar(size_bytes, "tokenizing") as bar:
            documents = read_sources(sources, text_column, bar.update)
            headers = write_token_file(
                documents,
                folder / TRAINING_FILE,
                Tokenizer.from_folder(own),
                held_out_file=folder / HELD_OUT_FILE if held_out else None,
                held_out=held_out,
                processes=processes,
                source=_named(sources),
            )
    return dict(zip((TRAINING_FILE, HELD_OUT_FILE), headers, strict=False))


def write_token_file(
    documents: Iterable[str],
    file: Path,
    tokenizer: Tokenizer,
    *,
    held_out_file: Path | None = None,
    held_out: float = 0.0,
    processes: int = 1,
    source: str = "the corpus",
) -> list[Header]:
    """Writes one token file, or two between which documents are split.

    Args:
        documents: The texts.
        file: The file, in a folder that appears only when it is complete.
        tokenizer: The tokenizer.
        held_out_file: The file for held-out documents.
        held_out: About what part of the documents it gets.
        processes: Number of processes.
        source: Where the texts come from, for messages.

    Returns:
        The headers of the files.

    Raises:
        TrainingError: A file would get no document.
        CheckpointError: The tokenizer cannot encode a text.
        OSError: A file cannot be written.
    """
    end, digest = end_of_text(tokenizer), tokenizer_digest(tokenizer)
    files = [file] if held_out_file is None else [file, held_out_file]
    with ExitStack() as stack:
        streams = [stack.enter_context(open(path, "wb")) for path in files]
        writers = [TokenFileWriter(s, tokenizer.vocab_size, end, digest) for s in streams]
        parts = stack.enter_context(closing(encode_documents(documents, tokenizer, end, processes)))
        for encoded in parts:
            sides = np.array([is_held_out(text, held_out) for text in encoded.documents])
            for side, writer in enumerate(writers):
                texts = [t for t, s in zip(encoded.documents, sides, strict=True) if s == side]
                writer.add(encoded.ids[np.repeat(sides == side, encoded.lengths)], texts)
        if not any(writer.documents for writer in writers):
            raise TrainingError(f"[data] {source} must hold a document but has none. Give a text.")
        if len(writers) > 1 and writers[0].documents and not writers[1].documents:
            raise TrainingError(
                "[tokenize] 'valid_fraction' must hold out one of the documents but holds out none of "
                f"{writers[0].documents:,} with {held_out}. Choose a larger one, or 0."
            )
        return [writer.finish() for writer in writers]


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that ends a document: `<|endoftext|>`, or else the end of a text.

    Raises:
        TrainingError: The tokenizer has neither.
    """
    ids = tokenizer.encode(END_OF_TEXT, add_special_tokens=False, parse_special=True)
    if len(ids) == 1:
        return ids[0]
    if tokenizer.eos_token_id is None:
        raise TrainingError(
            f"[data] the tokenizer in '{tokenizer.folder}' must have the token {END_OF_TEXT} or a token "
            "for the end of a text, which ends a document, but has neither. Use another tokenizer."
        )
    return tokenizer.eos_token_id


def _named(sources: Sequence[SourceFile]) -> str:
    more = f" or one of {len(sources) - 1:,} more files" if len(sources) > 1 else ""
    return f"'{sources[0].name}'{more}" if sources else "the corpus"


def _between(documents: Iterable[str], low: float, high: float) -> Iterator[str]:
    """The documents that are held out with one fraction but not with another."""
    for document in documents:
        if is_held_out(document, high) and not is_held_out(document, low):
            yield document

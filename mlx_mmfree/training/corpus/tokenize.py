"""Turns documents into token files: a corpus into a folder of them, or one text into one file."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import TrainingError
from ...files.checkpoint_files import CONFIG_FILE
from ...files.reading import check_link, expanded, tokenizer_files
from ...files.writing import new_folder
from ...hub.checkpoint.save import copy_files
from ...hub.remote.download import dataset_files
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
from .token_file import SUFFIX, Header, TokenFileWriter, byte_bar


def is_held_out(document: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out part.

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
        held = ", ".join(file.name for file in files[:8]) or "no file to read"
        raise TrainingError(
            f"[data] '{name}' must hold {' or '.join(FORMATS)} files, and {wanted}, but holds {held}."
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
    """The id that ends a document: that of `<|endoftext|>` or else of the end of a text.

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

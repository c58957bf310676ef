"""Where documents come from: files, folders and datasets of the Hub."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from ...errors import TrainingError
from ...files.reading import check_link, expanded
from ...hub.remote.download import dataset_files
from .documents import FORMATS, file_format, read_documents
from .pieces import COMPRESSED, OnBytes

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

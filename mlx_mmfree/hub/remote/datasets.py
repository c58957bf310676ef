"""The files of a dataset of the Hub, and of its splits."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError, DownloadError
from ...files.reading import expanded
from .download import REPOSITORY_NAME, ask_hub

SPLITS = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
"""The splits of a dataset, and the names that their files have."""

LINES_OR_PARQUET = ((".jsonl",), (".parquet",))
"""Kinds of files, each with its suffixes."""


def fetch_splits(name: str, kinds: Sequence[Sequence[str]]) -> tuple[Path, Sequence[str]]:
    """Downloads the files of the splits of a dataset, such as `train.jsonl`.

    Args:
        name: The dataset, `owner/name`.
        kinds: Kinds of files, each with its suffixes. The first that any split has is downloaded.

    Returns:
        The folder of the files, and the suffixes of their kind.

    Raises:
        CheckpointError: It cannot be the name of a dataset.
        DownloadError: The Hub does not hand out the dataset, or it has no such files.
    """
    if not REPOSITORY_NAME.fullmatch(name) or expanded(name).exists():
        raise CheckpointError(
            "[data] 'data' must be an existing file or folder of samples, or a Hub dataset 'owner/name' "
            f"but got {name!r:.200}, which is neither. Check the spelling."
        )
    for suffixes in kinds:
        names = tuple(
            f"{split}{suffix}"
            for names in SPLITS.values()
            for split in names
            for suffix in suffixes
        )
        folder = Path(ask_hub(name, None, names, repo_type="dataset"))
        if any((folder / each).is_file() for each in names):
            return folder, suffixes
    formats = ", ".join(suffixes[0] for suffixes in kinds)
    raise DownloadError(
        f"[data] the dataset '{name}' must hold train, valid or test as {formats} but has none. Name a "
        f"split whose files lie in a folder or are several: '{name}:train'."
    )


_SPLIT = re.compile(rf"({REPOSITORY_NAME.pattern}):((?:[\w.-]+/)*)([\w.-]+)", re.ASCII)


def names_split(name: str) -> bool:
    """Returns whether a name means a split of a dataset, `owner/name:split`."""
    return _SPLIT.fullmatch(name) is not None and not expanded(name).exists()


def split_files(
    name: str, kinds: Sequence[Sequence[str]] = LINES_OR_PARQUET
) -> list["DatasetFile"]:
    """The files of a split of a dataset in the order of their names. Nothing is downloaded.

    They are called as `split.jsonl` or `split-00000-of-00002.parquet`.

    Args:
        name: `owner/name:split`, or `owner/name:folder/split` where several folders have such a split.
        kinds: Kinds of files, each with its suffixes. The first that the split has counts.

    Raises:
        DownloadError: The Hub does not list the dataset, or it has no such split, or several.
    """
    found = _SPLIT.fullmatch(name)
    assert found is not None
    dataset, folder, split = found.groups()
    suffixes = [suffix for kind in kinds for suffix in kind]
    listed = dataset_files(dataset, None, [f"*{suffix}" for suffix in suffixes])
    # of several files, each has its number
    endings = "|".join(map(re.escape, suffixes))
    part = re.compile(rf"{re.escape(split)}(-\d+(-of-\d+[^.]*)?)?({endings})")
    paths = [PurePosixPath(file.name) for file in listed]
    chosen = [
        file
        for file, path in zip(listed, paths, strict=True)
        if part.fullmatch(path.name) and (not folder or f"{path.parent}/" == folder)
    ]
    folders = sorted({str(PurePosixPath(file.name).parent) for file in chosen})
    if len(folders) > 1:
        raise DownloadError(
            f"[data] '{name}' must be one split but lies in {', '.join(folders[:8])}. Name the folder: "
            f"'{dataset}:{folders[0]}/{split}'."
        )
    for kind in kinds:
        if rows := [file for file in chosen if file.name.endswith(tuple(kind))]:
            return rows
    formats = ", ".join(kind[0] for kind in kinds)
    present = ", ".join(file.name for file in listed[:8]) or "none of these"
    raise DownloadError(
        f"[data] '{name}' must name a split with files of {formats} but the dataset holds {present}."
    )


@dataclass(frozen=True)
class DatasetFile:
    """A file of a dataset.

    Attributes:
        dataset: Name of the dataset, `owner/name`.
        commit: The commit whose files are read.
        name: Path of the file in the dataset.
        size_bytes: Its size.
    """

    dataset: str
    commit: str
    name: str
    size_bytes: int

    def fetch(self) -> Path:
        """The file in the Hub's cache, downloaded if it is not there.

        Raises:
            DownloadError: The Hub does not hand it out.
        """
        pattern = escape(self.name)
        folder = ask_hub(
            self.dataset, self.commit, (pattern,), repo_type="dataset", has_folders=True
        )
        return Path(folder) / self.name


def dataset_files(
    name: str, revision: str | None = None, patterns: Sequence[str] = ("*",)
) -> list[DatasetFile]:
    """The files of a dataset in the order of their names. Nothing is downloaded.

    Args:
        name: The dataset, `owner/name`.
        revision: Branch, tag or commit. The files come from the commit that it is now.
        patterns: Names of the files to list.

    Raises:
        CheckpointError: It cannot be the name of a dataset.
        DownloadError: The Hub does not list the dataset.
    """
    if not REPOSITORY_NAME.fullmatch(name):
        raise CheckpointError(
            "[data] 'data' must be a file, a folder or a Hub dataset 'owner/name' but got "
            f"{name!r:.200}, which is none of these. Check the spelling."
        )
    listed = ask_hub(
        name, revision, tuple(patterns), dry_run=True, repo_type="dataset", has_folders=True
    )
    files = (
        DatasetFile(name, f.commit_hash, f.filename, f.file_size)
        for f in listed
        if not PurePosixPath(f.filename).name.startswith(".")
    )
    return sorted(files, key=lambda file: file.name)

"""The files of a data set of the Hub: which there are, and their download."""

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

DATASET_FILES = tuple(f"{name}.jsonl" for names in SPLITS.values() for name in names)


def dataset_folder(path_or_name: str, revision: str | None = None) -> Path:
    """The folder that holds JSON lines, downloaded if it is a dataset of the Hub.

    Args:
        path_or_name: An existing folder or a dataset id `owner/name`.
        revision: Branch, tag or commit of the dataset.

    Raises:
        CheckpointError: There is no such folder, and the name cannot be a dataset.
        DownloadError: The Hub does not hand out the dataset, or it has no JSON lines.
    """
    folder = expanded(path_or_name)
    if path_or_name and folder.is_dir():
        return folder
    if not REPOSITORY_NAME.fullmatch(path_or_name) or folder.exists():
        raise CheckpointError(
            "[data] 'data' must be an existing file or folder of samples, or a Hub dataset 'owner/name' "
            f"but got {path_or_name!r:.200}, which is neither. Check the spelling."
        )
    found = Path(ask_hub(path_or_name, revision, DATASET_FILES, repo_type="dataset"))
    if not any((found / name).is_file() for name in DATASET_FILES):
        raise DownloadError(
            f"[data] the dataset '{path_or_name}' must hold train.jsonl, valid.jsonl or test.jsonl "
            "but has none. Name a split with other JSON lines or parquet: "
            f"'{path_or_name}:train'."
        )
    return found


_SPLIT = re.compile(rf"({REPOSITORY_NAME.pattern}):((?:[\w.-]+/)*)([\w.-]+)", re.ASCII)
_ROWS = ("*.jsonl", "*.parquet")


def names_split(name: str) -> bool:
    """Whether a name means a split of a dataset, `owner/name:split`."""
    return _SPLIT.fullmatch(name) is not None and not expanded(name).exists()


def split_files(name: str, revision: str | None = None) -> list["DatasetFile"]:
    """The files of a split of a dataset in the order of their names. Nothing is downloaded.

    They are JSON lines or parquet called `split.jsonl` or `split-00000-of-00002.parquet`.

    Args:
        name: `owner/name:split`, or `owner/name:folder/split` where several folders have such a split.
        revision: Branch, tag or commit of the dataset.

    Raises:
        DownloadError: The Hub does not list the dataset, or it has no such split, or several.
    """
    found = _SPLIT.fullmatch(name)
    assert found is not None
    dataset, folder, split = found.groups()
    listed = dataset_files(dataset, revision, _ROWS)
    # of several files, each has its number
    part = re.compile(rf"{re.escape(split)}(-\d+(-of-\d+.*)?)?\.\w+")
    places = [PurePosixPath(file.name) for file in listed]
    chosen = [
        file
        for file, place in zip(listed, places, strict=True)
        if part.fullmatch(place.name) and (not folder or f"{place.parent}/" == folder)
    ]
    folders = sorted({str(PurePosixPath(file.name).parent) for file in chosen})
    if len(folders) > 1:
        raise DownloadError(
            f"[data] '{name}' must be one split but lies in {', '.join(folders[:8])}. Name the folder: "
            f"'{dataset}:{folders[0]}/{split}'."
        )
    kinds = [[f for f in chosen if f.name.endswith(kind[1:])] for kind in _ROWS]
    if not (rows := kinds[0] or kinds[1]):
        held = ", ".join(f.name for f in listed[:8]) or "no JSON lines and no parquet"
        raise DownloadError(
            f"[data] '{name}' must name a split with JSON lines or parquet but the dataset holds {held}."
        )
    return rows


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

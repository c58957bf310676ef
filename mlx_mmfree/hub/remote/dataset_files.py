"""The files of a dataset of the Hub, each fetched when it is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path, PurePosixPath

from ...errors import CheckpointError
from .download import REPOSITORY_NAME, ask_hub


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
        revision: Branch, tag or commit. The files are those of the commit that it is now.
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

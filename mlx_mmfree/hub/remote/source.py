"""Where a model is stored: a local folder or GGUF file, or a repository of the Hub."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ... import demo
from ...arguments import check_path
from ...errors import CheckpointError, DownloadError
from ...files import checkpoint_files
from ...files.gguf_file import part_names, whole_models
from ...files.reading import visible
from .download import REPOSITORY_NAME, ask_hub, meant

BUNDLED = "demo"
"""The name of the model in the package, unless a folder has it."""

_HUB_PATH = re.compile(rf"({REPOSITORY_NAME.pattern})((?:/\w[\w.-]*)*)", re.ASCII)
_TOP = PurePosixPath(".")
_OTHER_WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")


def hub_path(name: str) -> tuple[str, PurePosixPath] | None:
    """Splits a name into the repository and the folder or file in it, `.` for the top.

    Args:
        name: `owner/name`, `owner/name/folder`, or `owner/name/folder/file.gguf`, with any folders.

    Returns:
        `None` if the name cannot be a repository's.
    """
    found = _HUB_PATH.fullmatch(name)
    return None if found is None else (found[1], PurePosixPath(found[2].removeprefix("/")))


@dataclass(frozen=True)
class Source:
    """The path or repository of a model. `find_source` makes it of what a user gives.

    Attributes:
        name: The path or repository as the user gave it.
        path: The local folder or `.gguf` file; `None` if the model is in a repository.
        repository: The repository `owner/name`; empty for a local path.
        inner: The folder or file in the repository, `.` for its top.
        revision: Branch, tag or commit of the repository.
    """

    name: str
    path: Path | None = None
    repository: str = ""
    inner: PurePosixPath = _TOP
    revision: str | None = None

    def fetch(
        self,
        patterns: tuple[str, ...] = checkpoint_files.TOKENIZER_PATTERNS
        + checkpoint_files.WEIGHT_PATTERNS
        + checkpoint_files.ADAPTER_PATTERNS,
    ) -> Path:
        """Returns the folder or the GGUF file, downloaded if it is in a repository.

        A download shows its progress, goes on where an earlier one stopped, and is compared with the
        hashes that the Hub lists. The files go to the Hub's cache. Without a network the cached files
        are used.

        Args:
            patterns: Names of the files to download.

        Raises:
            CheckpointError: It is a file of another kind.
            DownloadError: The Hub does not hand out the repository.
        """
        if self.path is not None:
            return self.path
        folder = str(self.inner)
        if self.inner.suffix == checkpoint_files.GGUF_SUFFIX:
            patterns, folder = tuple(part_names(self.inner.name)), str(self.inner.parent)
        elif self.inner.suffix in _OTHER_WEIGHTS:
            beside = self._gguf_files(self.inner.parent)
            raise _other_kind(self.name, f"{self.repository}/{self.inner.parent}", beside)
        snapshot = ask_hub(self.repository, self.revision, patterns, folder=folder, given=self.name)
        return Path(snapshot) / self.inner

    def gguf_file(self, folder: Path) -> Path | None:
        """Returns the one GGUF file of a folder, or the first part of its one model.

        The file is downloaded, with all parts, if the folder came from the Hub without it.

        Args:
            folder: The result of `fetch`. If it is a file, that is the answer.

        Returns:
            `None` if there is no GGUF file.

        Raises:
            CheckpointError: There are several models.
            DownloadError: The Hub does not hand out the file.
        """
        if folder.is_file():
            return folder
        suffix = checkpoint_files.GGUF_SUFFIX
        names = whole_models(file.name for file in visible(folder, f"*{suffix}"))
        if self.path is None:
            try:
                names = whole_models(self._gguf_files(self.inner))
            except DownloadError:
                # without a network, what the cache holds of them
                if not names:
                    raise
        if len(names) > 1:
            raise CheckpointError(
                f"[load] '{self.name}' must hold one {suffix} file but holds {len(names)}: "
                f"{', '.join(names[:8])}. Give one as '{self.name}/{names[0]}'."
            )
        if not names:
            return None
        if self.path is None:
            parts, inner = tuple(part_names(names[0])), str(self.inner)
            snapshot = ask_hub(self.repository, self.revision, parts, folder=inner, given=self.name)
            folder = Path(snapshot) / self.inner
        return folder / names[0]

    def models_within(self) -> list[str]:
        """Lists the folders with models in the folder or repository, sorted, as a user may give them.

        The list is empty if the Hub does not hand it out.
        """
        patterns = [f"*/{checkpoint_files.CONFIG_FILE}", f"*/*{checkpoint_files.GGUF_SUFFIX}"]
        if self.path is not None:
            files = [file for pattern in patterns for file in visible(self.path, pattern)]
            return sorted({str(file.parent) for file in files})
        try:
            listed = ask_hub(
                self.repository, self.revision, tuple(patterns), dry_run=True, has_folders=True
            )
        except DownloadError:
            return []
        found = {f"{self.repository}/{PurePosixPath(file.filename).parent}" for file in listed}
        return sorted(each for each in found if hub_path(each) is not None)

    def _gguf_files(self, folder: PurePosixPath) -> list[str]:
        """The names of the GGUF files in a folder of the repository."""
        patterns = (f"*{checkpoint_files.GGUF_SUFFIX}",)
        listed = ask_hub(
            self.repository,
            self.revision,
            patterns,
            dry_run=True,
            folder=str(folder),
            given=self.name,
        )
        names = (PurePosixPath(file.filename).name for file in listed)
        return [name for name in names if not name.startswith(".")]


def find_source(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Finds out whether a user means a local path or a repository. Nothing is downloaded.

    Args:
        path_or_repo: An existing folder or `.gguf` file, a repository id `owner/name`, or a folder
            `owner/name/folder` or a file `owner/name/folder/file.gguf` in one. `demo` is the model in
            the package, unless there is such a folder.
        revision: Branch, tag or commit of the repository. A folder has none.

    Raises:
        CheckpointError: There is no such folder, and the name cannot be a repository.
        TypeError: It is neither a text nor a path.
    """
    check_path("load", "path_or_repo", path_or_repo, "a folder, a file or a Hub repository")
    name = os.fspath(path_or_repo)
    path = Path(os.path.expanduser(name))
    if name == BUNDLED and not path.exists():
        path = demo.path()
    is_file = path.suffix == checkpoint_files.GGUF_SUFFIX and path.is_file()
    if name and (path.is_dir() or is_file):
        if revision is not None:
            raise CheckpointError(
                f"[load] 'revision' must be left out for folder '{path}' but got {revision!r}. A "
                "folder has no revisions."
            )
        return Source(name, path)
    if name and path.exists():
        beside = [file.name for file in visible(path.parent, f"*{checkpoint_files.GGUF_SUFFIX}")]
        raise _other_kind(str(path), str(path.parent), beside)
    found = hub_path(name) if isinstance(path_or_repo, str) else None
    if found is None:
        raise CheckpointError(
            "[load] 'path_or_repo' must be an existing folder or a Hub repository 'owner/name', perhaps "
            f"with a folder or a {checkpoint_files.GGUF_SUFFIX} file in it, but got {name!r}, which is "
            f"neither. {meant(name)}'mmfree models --known' lists repositories that load."
        )
    repository, inner = found
    return Source(name, None, repository, inner, revision)


def _other_kind(file: str, folder: str, beside: Sequence[str]) -> CheckpointError:
    """The error for a file of another kind, which names the GGUF file beside it."""
    suffix, folder = checkpoint_files.GGUF_SUFFIX, folder.removesuffix("/.")
    models = whole_models(beside)
    hint = f"Give '{folder}/{models[0]}'." if models else "Give the folder that holds it."
    return CheckpointError(
        f"[load] 'path_or_repo' must be a folder with a checkpoint or a {suffix} file but '{file}' is a "
        f"file of another kind. {hint}"
    )

"""Turns a path or a repository of the Hub into a local folder, and lists the files of a dataset."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from ... import demo
from ...errors import CheckpointError, DownloadError, MMFreeError
from ...files import checkpoint_files
from ...files.gguf_file import part_names, whole_models
from ...files.reading import expanded, visible
from .cache_content import fetch_missing

SPLITS = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
"""The splits of a dataset, and the names that their files have."""

DATASET_FILES = tuple(f"{name}.jsonl" for names in SPLITS.values() for name in names)

BUNDLED = "demo"
"""The name of the model in the package, unless a folder has it."""
REPOSITORY_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_PLACE = re.compile(rf"({REPOSITORY_NAME.pattern})((?:/\w[\w.-]*)*)", re.ASCII)
_OTHER_WEIGHTS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")


def place_in_hub(name: str) -> tuple[str, PurePosixPath] | None:
    """The repository that a name means, and the folder or file in it, `.` for the top.

    Args:
        name: `owner/name`, `owner/name/folder`, or `owner/name/folder/file.gguf`, with any folders.

    Returns:
        `None` if the name means no repository.
    """
    found = _PLACE.fullmatch(name)
    return None if found is None else (found[1], PurePosixPath(found[2].removeprefix("/")))


def local_folder(
    path_or_repo: str | os.PathLike[str],
    revision: str | None = None,
    *,
    patterns: tuple[str, ...] = checkpoint_files.TOKENIZER_PATTERNS
    + checkpoint_files.WEIGHT_PATTERNS
    + checkpoint_files.ADAPTER_PATTERNS,
) -> Path:
    """The folder or the GGUF file that holds a checkpoint, downloaded if it is a repository of the Hub.

    A download shows its progress, goes on where an earlier one stopped, and is compared with the hashes
    that the Hub lists. The files go to the Hub's cache. Without a network the cached files are used.

    Args:
        path_or_repo: An existing folder or `.gguf` file, a repository id `owner/name`, or a folder
            `owner/name/folder` or a file `owner/name/folder/file.gguf` in one. `demo` is the model in
            the package, unless there is such a folder.
        revision: Branch, tag or commit of the repository. A folder has none.
        patterns: Names of the files to download.

    Raises:
        CheckpointError: There is no such folder, and the name cannot be a repository.
        DownloadError: The Hub does not hand out the repository.
    """
    name = os.fspath(path_or_repo)
    folder = Path(os.path.expanduser(name))
    if name == BUNDLED and not folder.exists():
        folder = demo.path()
    is_file = folder.suffix == checkpoint_files.GGUF_SUFFIX and folder.is_file()
    if name and (folder.is_dir() or is_file):
        if revision is not None:
            raise CheckpointError(
                f"[load] 'revision' must be left out for folder '{folder}' but got {revision!r}. A "
                "folder has no revisions."
            )
        return folder
    if name and folder.exists():
        beside = [file.name for file in visible(folder.parent, f"*{checkpoint_files.GGUF_SUFFIX}")]
        raise _other_kind(str(folder), str(folder.parent), beside)
    place = place_in_hub(name) if isinstance(path_or_repo, str) else None
    if place is None:
        raise CheckpointError(
            "[load] 'path_or_repo' must be an existing folder or a Hub repository 'owner/name', perhaps "
            f"with a folder or a {checkpoint_files.GGUF_SUFFIX} file in it, but got {name!r}, which is "
            f"neither. {meant(name)}'mmfree models --known' lists repositories that load."
        )
    repository, inner = place
    if inner.suffix == checkpoint_files.GGUF_SUFFIX:
        names = tuple(part_names(inner.name))
        held = ask_hub(repository, revision, names, folder=str(inner.parent), given=name)
        return Path(held) / inner
    if inner.suffix in _OTHER_WEIGHTS:
        held = f"{repository}/{inner.parent}".removesuffix("/.")
        raise _other_kind(name, held, _gguf_files(repository, revision, inner.parent, name))
    return Path(ask_hub(repository, revision, patterns, folder=str(inner), given=name)) / inner


def _other_kind(file: str, folder: str, beside: Sequence[str]) -> CheckpointError:
    """The error for a file of another kind, which names the GGUF file beside it."""
    suffix = checkpoint_files.GGUF_SUFFIX
    models = whole_models(beside)
    way_out = f"Give '{folder}/{models[0]}'." if models else "Give the folder that holds it."
    return CheckpointError(
        f"[load] 'path_or_repo' must be a folder with a checkpoint or a {suffix} file but '{file}' is a "
        f"file of another kind. {way_out}"
    )


def _gguf_files(
    repository: str, revision: str | None, folder: PurePosixPath, given: str
) -> list[str]:
    """The names of the GGUF files in a folder of a repository."""
    patterns = (f"*{checkpoint_files.GGUF_SUFFIX}",)
    listed = ask_hub(repository, revision, patterns, dry_run=True, folder=str(folder), given=given)
    names = (PurePosixPath(file.filename).name for file in listed)
    return [name for name in names if not name.startswith(".")]


def models_within(path_or_repo: str | os.PathLike[str], revision: str | None) -> list[str]:
    """The folders with models in a folder or in the repository that a name means, sorted.

    Args:
        path_or_repo, revision: The arguments of `local_folder`.

    Returns:
        Each as `local_folder` takes it; none where the Hub does not list them.
    """
    name = os.fspath(path_or_repo)
    here = expanded(name)
    patterns = [f"*/{checkpoint_files.CONFIG_FILE}", f"*/*{checkpoint_files.GGUF_SUFFIX}"]
    if here.is_dir():
        files = [file for pattern in patterns for file in visible(here, pattern)]
        return sorted({str(file.parent) for file in files})
    place = place_in_hub(name)
    if place is None:
        return []
    try:
        listed = ask_hub(place[0], revision, tuple(patterns), dry_run=True, has_folders=True)
    except DownloadError:
        return []
    found = {f"{place[0]}/{PurePosixPath(file.filename).parent}" for file in listed}
    return sorted(each for each in found if place_in_hub(each) is not None)


def gguf_file(
    folder: Path, path_or_repo: str | os.PathLike[str], revision: str | None
) -> Path | None:
    """The one GGUF file of a folder, or the first part of its one model; `None` if there is none.

    The file is downloaded, with all parts, if the folder came from the Hub without it.

    Args:
        folder: The result of `local_folder`. If it is a file, that is the answer.
        path_or_repo, revision: The arguments of `local_folder`.

    Raises:
        CheckpointError: There are several models.
        DownloadError: The Hub does not hand out the file.
    """
    if folder.is_file():
        return folder
    name = os.fspath(path_or_repo)
    names = whole_models(file.name for file in visible(folder, f"*{checkpoint_files.GGUF_SUFFIX}"))
    place = None if Path(os.path.expanduser(name)).is_dir() else place_in_hub(name)
    if place is not None:
        try:
            names = whole_models(_gguf_files(place[0], revision, place[1], name))
        except DownloadError:
            # without a network, what the cache holds of them
            if not names:
                raise
    if len(names) > 1:
        raise CheckpointError(
            f"[load] '{name}' must hold one {checkpoint_files.GGUF_SUFFIX} file but holds {len(names)}: "
            f"{', '.join(names[:8])}. Give one as '{name}/{names[0]}'."
        )
    if not names:
        return None
    if place is not None:
        repository, inner = place
        parts = tuple(part_names(names[0]))
        held = ask_hub(repository, revision, parts, folder=str(inner), given=name)
        folder = Path(held) / inner
    return folder / names[0]


def dataset_folder(path_or_repo: str, revision: str | None = None) -> Path:
    """The folder that holds JSON lines, downloaded if it is a dataset of the Hub.

    Args:
        path_or_repo: An existing folder or a dataset id `owner/name`.
        revision: Branch, tag or commit of the dataset.

    Raises:
        CheckpointError: There is no such folder, and the name cannot be a dataset.
        DownloadError: The Hub does not hand out the dataset, or it has no JSON lines.
    """
    folder = expanded(path_or_repo)
    if path_or_repo and folder.is_dir():
        return folder
    if not REPOSITORY_NAME.fullmatch(path_or_repo) or folder.exists():
        raise CheckpointError(
            "[data] 'data' must be an existing file or folder of samples, or a Hub dataset 'owner/name' "
            f"but got {path_or_repo!r:.200}, which is neither. Check the spelling."
        )
    found = Path(ask_hub(path_or_repo, revision, DATASET_FILES, repo_type="dataset"))
    if not any((found / name).is_file() for name in DATASET_FILES):
        raise DownloadError(
            f"[data] the dataset '{path_or_repo}' must hold train.jsonl, valid.jsonl or test.jsonl "
            "but has none. Name a split with other JSON lines or parquet: "
            f"'{path_or_repo}:train'."
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


def ask_hub(
    repository: str,
    revision: str | None,
    patterns: tuple[str, ...],
    dry_run: bool = False,
    repo_type: str | None = None,
    has_folders: bool = False,
    folder: str = ".",
    given: str = "",
) -> Any:
    """Downloads the files of a repository that match a pattern, or only lists them.

    Args:
        repository: The repository id `owner/name`.
        revision: Branch, tag or commit.
        patterns: Names of the files.
        dry_run: Only list the files, as `huggingface_hub` describes them.
        repo_type: `"dataset"`; `None` for a model.
        has_folders: Whether files in folders match too.
        folder: The folder in the repository whose files match.
        given: What the user named, where that is a folder or a file in the repository.

    Returns:
        The folder of the files in the Hub's cache, or the list.

    Raises:
        DownloadError: The Hub does not hand out the repository.
    """
    # slow to import, and not needed for a local folder
    import huggingface_hub
    from huggingface_hub import errors

    place = f"'{repository}'" + (f" at revision '{revision}'" if revision else "")
    kind = "datasets/" if repo_type == "dataset" else ""
    check_login("load", DownloadError)
    neither = f"{place} is neither a local folder nor"
    if given not in ("", repository):
        neither = (
            f"'{given}' is no local folder or file, and the repository {place}, in which it may lie, is "
            "not"
        )
    page = f"https://huggingface.co/{kind}{repository}"
    with _quiet_client(), _hub_errors(place, neither, page, repository):
        ignored, start = _ignored(patterns, has_folders), "" if folder == "." else f"{folder}/"
        snapshot = partial(
            huggingface_hub.snapshot_download,
            repository,
            revision=revision,
            allow_patterns=[start + pattern for pattern in patterns],
            ignore_patterns=ignored and [start + pattern for pattern in ignored],
            repo_type=repo_type,
            tqdm_class=_silent_bar(),
        )
        if not dry_run:
            fetch_missing(snapshot, repository, repo_type)
        try:
            return snapshot(dry_run=dry_run)
        except errors.DryRunError as error:
            # it hides the Hub's answer, if there was one
            if isinstance(error.__cause__, errors.HfHubHTTPError):
                raise error.__cause__ from None
            raise errors.LocalEntryNotFoundError(str(error)) from error


def _ignored(patterns: tuple[str, ...], has_folders: bool) -> list[str] | None:
    """Names that the patterns of files of the top folder must not match."""
    if has_folders:
        return None
    # no other folders have files; patterns cannot say "not"
    first = "".join(sorted({pattern[0] for pattern in patterns if "/" in pattern}))
    return [f"[!{first}]*/*", "*/*/*"] if first else ["*/*"]


def _silent_bar() -> Any:
    """A progress bar that shows nothing: the package finds the files, which were downloaded before."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Leaves out a line of the client that names patterns: what is missing is told in one error."""

    def is_of_use(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No files matched")

    logger = logging.getLogger("huggingface_hub._snapshot_download")
    logger.addFilter(is_of_use)
    try:
        yield
    finally:
        logger.removeFilter(is_of_use)


@contextmanager
def _hub_errors(place: str, neither: str, page: str, repository: str) -> Iterator[None]:
    """Turns errors of downloads into one line.

    Args:
        place: The repository and revision, in words.
        neither: The beginning of the error if it is not there, up to "nor" or "not".
        page: The address of the repository's page.
        repository: The repository.

    Raises:
        DownloadError: The Hub, the network or the disk failed.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"[load] {place} is gated. Ask for access on {page}, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"[load] {neither} a repository of the Hub. {meant(repository)}A private repository "
            "needs `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"[load] {place} does not exist. Its branches, tags and commits are listed on {page}."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(_offline_message(neither, repository)) from error
    except errors.HFValidationError as error:
        raise DownloadError(
            f"[load] {place} is not a valid repository id: {one_line(error)}. Check the spelling."
        ) from error
    except errors.HfHubHTTPError as error:
        raise DownloadError(
            f"[load] the Hub did not hand out {place}: {one_line(error)}. Try again later."
        ) from error
    except (OSError, errors.HTTPError, RuntimeError) as error:
        raise DownloadError(
            f"[load] {place} cannot be downloaded: {one_line(error)}. Check the network and the free "
            "space of the cache; a new start goes on where this one stopped."
        ) from error


def meant(name: str) -> str:
    """The question whether a repository is meant that is known to load, or the advice on spelling.

    Args:
        name: What was given: with the letters of another case, without its owner, or misspelt.
    """
    from ...models import architectures

    known = {
        repository.lower(): repository
        for architecture in architectures().values()
        for repository in architecture.repositories
        if "*" not in repository
    }
    given = name.lower()
    close = [each for each in known if each.partition("/")[2] == given]
    close = close or get_close_matches(given, known, n=1, cutoff=0.9)
    if given in known or close:
        found = known[given if given in known else close[0]]
        if found != name:
            return f"Did you mean '{found}'? "
    return "Check the spelling. "


def check_login(place: str, kind: type[MMFreeError]) -> None:
    """Refuses a token that no request can carry, since the errors of the packages below would show it.

    Args:
        place: What needs the login, for the message.
        kind: The error to raise.

    Raises:
        MMFreeError: The token is not in plain letters and digits.
    """
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise kind(
            f"[{place}] the login must be a token in plain letters and digits but is not. Run `hf auth "
            "login` again, or correct HF_TOKEN."
        )


def _offline_message(neither: str, repository: str) -> str:
    from huggingface_hub import is_offline_mode

    absent = f"[load] {neither} completely in the local cache, and"
    if is_offline_mode():
        return (
            f"{absent} HF_HUB_OFFLINE forbids a download. {meant(repository)}Unset HF_HUB_OFFLINE, or "
            "give a local folder."
        )
    return (
        f"{absent} the Hub cannot be reached. {meant(repository)}Check the network, or give a local "
        "folder."
    )


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


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

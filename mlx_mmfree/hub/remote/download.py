"""Downloads files of repositories of the Hub, with errors of one line."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

from ...errors import DownloadError, MMFreeError
from .cache_content import fetch_missing

REPOSITORY_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


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

    target = f"'{repository}'" + (f" at revision '{revision}'" if revision else "")
    kind = "datasets/" if repo_type == "dataset" else ""
    check_login("load", DownloadError)
    neither = f"{target} is neither a local folder nor"
    if given not in ("", repository):
        neither = (
            f"'{given}' is no local folder or file, and the repository {target}, in which it may lie, "
            "is not"
        )
    page = f"https://huggingface.co/{kind}{repository}"
    with _quiet_client(), _hub_errors(target, neither, page, repository):
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
    """Leaves out a line of the client that names patterns: what is missing is reported in one error."""

    def is_of_use(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No files matched")

    logger = logging.getLogger("huggingface_hub._snapshot_download")
    logger.addFilter(is_of_use)
    try:
        yield
    finally:
        logger.removeFilter(is_of_use)


@contextmanager
def _hub_errors(target: str, neither: str, page: str, repository: str) -> Iterator[None]:
    """Turns errors of downloads into one line.

    Args:
        target: The repository and revision, as text.
        neither: The first words of the error if it is not there, up to "nor" or "not".
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
            f"[load] {target} is gated. Ask for access on {page}, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"[load] {neither} a repository of the Hub. {meant(repository)}A private repository "
            "needs `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"[load] {target} does not exist. Its branches, tags and commits are listed on {page}."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise DownloadError(_offline_message(neither, repository)) from error
    except errors.HFValidationError as error:
        raise DownloadError(
            f"[load] {target} is not a valid repository id: {one_line(error)}. Check the spelling."
        ) from error
    except errors.HfHubHTTPError as error:
        raise DownloadError(
            f"[load] the Hub did not hand out {target}: {one_line(error)}. Try again later."
        ) from error
    except (OSError, errors.HTTPError, RuntimeError) as error:
        raise DownloadError(
            f"[load] {target} cannot be downloaded: {one_line(error)}. Check the network and the free "
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
        return "" if found == name else f"Did you mean '{found}'? "
    return "Check the spelling. "


def check_login(caller: str, kind: type[MMFreeError]) -> None:
    """Refuses a token that no request can carry, since the errors of the packages below would show it.

    Args:
        caller: What needs the login, for the message.
        kind: The error to raise.

    Raises:
        MMFreeError: The token is not in plain letters and digits.
    """
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise kind(
            f"[{caller}] the login must be a token in plain letters and digits but is not. Run `hf auth "
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

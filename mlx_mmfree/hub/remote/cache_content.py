"""Downloads files into the Hub's cache, where `huggingface_hub` then finds them.

Unlike that package, this goes on where an earlier process stopped, and compares every file with the hash
that the Hub lists: the SHA-256 of large files, git's SHA-1 of small ones. The cache keeps the beginning
of a file as `<hash>.incomplete`, locked by the process that writes it.
"""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from http.client import PARTIAL_CONTENT
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import DownloadError
from ...files.replacing import sync
from ...files.space import check_space
from .partial_file import OnBytes, Part, RemoteFile, is_hash, locked_part
from .patience import MAX_TRIES, PASSING, patiently, wait

MAX_BYTES = 50 * 10**9
"""Larger files are left to `huggingface_hub`, since the Hub does not send them over plain HTTP."""

_WORKERS = 4
_WAIT_S, _MAX_WAIT_S = 0.2, 8


def fetch_missing(
    repository: str,
    revision: str | None,
    patterns: tuple[str, ...],
    repo_type: str | None,
    has_folders: bool = False,
) -> None:
    """Downloads the files that match a pattern and are missing in the Hub's cache.

    Without a network it does nothing: the caller then reports that, or finds all files in the cache.

    Args:
        repository: The repository id `owner/name`.
        revision: Branch, tag or commit.
        patterns: Names of files of the top folder.
        repo_type: `"dataset"`; `None` for a model.
        has_folders: Whether files in folders match too.

    Raises:
        DownloadError: A file does not have the hash that the Hub lists.
        HTTPError, OSError: The Hub or the disk fails.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, tqdm

    files = _missing_files(repository, revision, patterns, repo_type, has_folders)
    if not files:
        return
    folder = files[0].content.parent
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(min(file.part_bytes, file.nbytes) for file in files)
    total = sum(file.nbytes for file in files)
    check_space(folder, total - done)
    is_stopped = threading.Event()
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=f"downloading {len(files)} files",
        disable=are_progress_bars_disabled(),
    ) as bar:

        def update(count: int) -> None:
            if is_stopped.is_set():
                raise OSError("the download was stopped")
            bar.update(count)

        with ThreadPoolExecutor(_WORKERS) as pool:
            try:
                for fetched in [pool.submit(_fetch, file, update) for file in files]:
                    fetched.result()
            except BaseException:
                # the other threads stop at their next piece and keep what they have
                is_stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _missing_files(
    repository: str,
    revision: str | None,
    patterns: tuple[str, ...],
    repo_type: str | None,
    has_folders: bool,
) -> list[RemoteFile]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import DryRunError

    from .download import ignored, silent_bar

    try:
        listed = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=ignored(patterns, has_folders),
            repo_type=repo_type,
            dry_run=True,
            tqdm_class=silent_bar(),
        )
    except DryRunError:
        return []
    files: dict[str, RemoteFile] = {}
    for file in listed:
        if not file.will_download:
            continue
        url = hf_hub_url(repository, file.filename, repo_type=repo_type, revision=file.commit_hash)
        metadata = patiently(partial(get_hf_file_metadata, url), f"[load] '{file.filename}'")
        etag, nbytes = metadata.etag or "", metadata.size
        if is_hash(etag) and nbytes is not None and nbytes <= MAX_BYTES:
            # <repository>/snapshots/<commit>/<file>, where the file's name may hold folders
            depth = len(PurePosixPath(file.filename).parts)
            content = Path(file.local_path).parents[1 + depth] / "blobs" / etag
            files[etag] = RemoteFile(file.filename, url, nbytes, etag, content)
    return list(files.values())


def _fetch(file: RemoteFile, on_bytes: OnBytes) -> None:
    """Downloads all of one file into the cache."""
    with locked_part(file) as stream:
        if stream is None:
            on_bytes(file.nbytes)
            return
        part = Part(file, stream, on_bytes)
        part.read_again()
        is_resumed = part.nbytes > 0
        is_whole = _receive(part)
        if is_resumed and (not is_whole or part.hash != file.etag):
            # the server sends whole files only, or the beginning is damaged
            part.restart()
            _receive(part)
        if part.hash != file.etag:
            file.part.unlink(missing_ok=True)
            raise DownloadError(
                f"[load] the file '{file.name}' must have the hash {file.etag}, which the Hub lists, "
                f"but what was sent has {part.hash}. It is not kept. Try again; a proxy or mirror may "
                "change files."
            )
        sync(file.part)
        os.replace(file.part, file.content)
        sync(file.content.parent)


def _receive(part: Part) -> bool:
    """Asks for the rest of a file until it is there; `False` if the server sends whole files only."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import hf_raise_for_status

    name, failures = part.file.name, 0
    while part.nbytes < part.file.nbytes:
        before = part.nbytes
        try:
            with _ask_for_rest(part) as answer:
                if answer.status_code in PASSING and failures < MAX_TRIES - 1:
                    failures += 1
                    wait(answer.status_code, answer.headers, failures, f"[load] '{name}'")
                    continue
                hf_raise_for_status(answer)
                if before and answer.status_code != PARTIAL_CONTENT:
                    return False
                for piece in answer.iter_bytes():
                    part.write(piece)
            failures += 1
        except HfHubHTTPError:
            raise
        except HTTPError:
            failures += 1
            if failures >= MAX_TRIES:
                raise
        if part.nbytes > before:
            failures = 0
        elif failures >= MAX_TRIES:
            raise OSError(f"the server sends nothing more of '{name}'")
        else:
            time.sleep(min(_WAIT_S * 2**failures, _MAX_WAIT_S))
    return True


def _ask_for_rest(part: Part) -> AbstractContextManager[Any]:
    """The answer to a request for the bytes that are missing, which are read inside the block."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers

    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    if part.nbytes:
        headers["Range"] = f"bytes={part.nbytes}-"
    answer: AbstractContextManager[Any] = get_session().stream(
        "GET",
        part.file.url,
        headers=headers,
        follow_redirects=True,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    return answer

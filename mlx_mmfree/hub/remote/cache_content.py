"""Fetches files of the Hub into its cache, which `huggingface_hub` then finds there.

Unlike that package, this goes on where an earlier process stopped, and compares every file with the
hash that the Hub gives: SHA-256 of large files, git's SHA-1 of small ones. What is there of a file lies
beside the others' contents as `<hash>.incomplete`, locked by the process that writes it.
"""

import fcntl
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import DownloadError
from ...files.replacing import sync
from ...files.space import check_space
from .patience import MAX_TRIES, PASSING, patiently, wait

MAX_BYTES = 50 * 10**9
"""Larger files are left to `huggingface_hub`, since the Hub does not send them over plain HTTP."""

_WORKERS = 4
_PIECE_BYTES = 1 << 20
_WAIT_S = 0.2
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class RemoteFile:
    """A file of the Hub.

    Attributes:
        name: Its path in the repository.
        url: Its address.
        nbytes: Its size.
        etag: The hash of its content.
        content: Where the cache keeps the content.
    """

    name: str
    url: str
    nbytes: int
    etag: str
    content: Path

    @property
    def part(self) -> Path:
        """Where the beginning lies until the rest has come."""
        return self.content.with_name(f"{self.etag}.incomplete")

    def new_digest(self) -> Any:
        """What the content is hashed with."""
        if _SHA256.fullmatch(self.etag):
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False)


def fetch_missing(
    repository: str, revision: str | None, patterns: tuple[str, ...], repo_type: str | None
) -> None:
    """Brings the content of files that match into the Hub's cache.

    Without a network nothing is done: what comes next reports it, or finds all in the cache.

    Args:
        repository: The repository id `owner/name`.
        revision: Branch, tag or commit.
        patterns: Names of files of the top folder.
        repo_type: `"dataset"`; `None` for a model.

    Raises:
        DownloadError: The content of a file is not what the Hub's hash says.
        HTTPError, OSError: The Hub or the disk refuses.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, tqdm

    files = _missing_files(repository, revision, patterns, repo_type)
    if not files:
        return
    folder = files[0].content.parent
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(min(_size(file.part), file.nbytes) for file in files)
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
                # the others stop at their next piece, and keep what they have
                is_stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _missing_files(
    repository: str, revision: str | None, patterns: tuple[str, ...], repo_type: str | None
) -> list[RemoteFile]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import DryRunError

    from .download import silent_bar

    try:
        listed = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
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
        is_known = _SHA256.fullmatch(etag) or _GIT_SHA1.fullmatch(etag)
        if is_known and nbytes is not None and nbytes <= MAX_BYTES:
            # <repository>/snapshots/<commit>/<file>
            content = Path(file.local_path).parents[2] / "blobs" / etag
            files[etag] = RemoteFile(file.filename, url, nbytes, etag, content)
    return list(files.values())


def _fetch(file: RemoteFile, on_bytes: OnBytes) -> None:
    """Brings one file whole into the cache."""
    with _locked_part(file) as stream:
        if stream is None:
            on_bytes(file.nbytes)
            return
        digest = file.new_digest()
        resumed = _read_again(stream, file, digest, on_bytes)
        is_whole = _receive(stream, file, resumed, digest, on_bytes)
        if resumed and (not is_whole or digest.hexdigest() != file.etag):
            # the server sends whole files only, or the beginning is damaged
            on_bytes(-stream.tell())
            digest = file.new_digest()
            stream.truncate(0)
            _receive(stream, file, 0, digest, on_bytes)
        if digest.hexdigest() != file.etag:
            file.part.unlink(missing_ok=True)
            raise DownloadError(
                f"[load] the file '{file.name}' that was sent must have the content that the Hub "
                f"lists, with the hash {file.etag}, but has {digest.hexdigest()}. It is not kept. Try "
                "again; a proxy or mirror may change files."
            )
        sync(file.part)
        os.replace(file.part, file.content)
        sync(file.content.parent)


@contextmanager
def _locked_part(file: RemoteFile) -> Iterator[BinaryIO | None]:
    """The beginning of a file to write on; `None` if another process has brought all of it."""
    while not file.content.exists():
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(file.part, flags, 0o644), "r+b", buffering=0) as stream:
            _lock(stream, file)
            # meanwhile another may have finished the file or thrown it away
            is_part = file.part.exists() and os.path.samestat(
                os.fstat(stream.fileno()), os.lstat(file.part)
            )
            if is_part and file.content.exists():
                file.part.unlink()
            elif is_part:
                yield stream
                return
    yield None


def _lock(stream: Any, file: RemoteFile) -> None:
    is_told = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_told:
                print(f"[load] another process downloads '{file.name}'; waiting", file=sys.stderr)
                is_told = True
            time.sleep(_WAIT_S)
        except OSError:
            # a network disk without locks
            return


def _read_again(stream: BinaryIO, file: RemoteFile, digest: Any, on_bytes: OnBytes) -> int:
    """Hashes what an earlier process brought, and gives its bytes."""
    if _size(file.part) > file.nbytes:
        stream.truncate(0)
    count = 0
    while piece := stream.read(_PIECE_BYTES):
        digest.update(piece)
        count += len(piece)
        on_bytes(len(piece))
    return count


def _receive(
    stream: BinaryIO, file: RemoteFile, start: int, digest: Any, on_bytes: OnBytes
) -> bool:
    """Asks for the rest until it is there; `False` if the server sends whole files only."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    stream.seek(start)
    failures = 0
    while start < file.nbytes:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        before = start
        try:
            with get_session().stream(
                "GET",
                file.url,
                headers=headers,
                follow_redirects=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as answer:
                if answer.status_code in PASSING and failures < MAX_TRIES - 1:
                    failures += 1
                    wait(answer.status_code, answer.headers, failures, f"[load] '{file.name}'")
                    continue
                hf_raise_for_status(answer)
                if start and answer.status_code != 206:
                    return False
                for piece in answer.iter_bytes():
                    if start + len(piece) > file.nbytes:
                        raise DownloadError(
                            f"[load] '{file.name}' must have {file.nbytes} bytes, as the Hub lists, but "
                            "more are sent. Try again."
                        )
                    stream.write(piece)
                    digest.update(piece)
                    start += len(piece)
                    on_bytes(len(piece))
            failures += 1
        except HfHubHTTPError:
            raise
        except HTTPError:
            failures += 1
            if failures >= MAX_TRIES:
                raise
        if start > before:
            failures = 0
        elif failures >= MAX_TRIES:
            raise OSError(f"the server sends nothing more of '{file.name}'")
        elif start < file.nbytes:
            time.sleep(min(_WAIT_S * 2**failures, 8))
    return True


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0

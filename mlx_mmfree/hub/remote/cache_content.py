"""Downloads files into the Hub's cache, where `huggingface_hub` then finds them.

Unlike that package, this goes on where an earlier process stopped, and compares every file with the hash
that the Hub lists: the SHA-256 of large files, git's SHA-1 of small ones. The cache has the first part
of a file as `<hash>.incomplete`, locked by the process that writes it.
"""

import fcntl
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import PARTIAL_CONTENT
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from ...errors import DownloadError
from ...files.writing import check_space, sync
from ...platform.progress import Progress

PASSING = (408, 429, 500, 502, 503, 504)
"""The statuses that may pass: a later request may succeed."""

MAX_TRIES = 6
MAX_DELAY_S = 300.0

Result = TypeVar("Result")

_RESET = re.compile(r"\bt=([0-9]{1,9})\b")


def patiently(call: Callable[[], Result], what: str) -> Result:
    """The result of a call, which is repeated while the Hub is busy or fails.

    Args:
        call: The call. It may be made several times.
        what: What is written or read, for a notice on stderr.

    Raises:
        HfHubHTTPError: The Hub refuses for another reason, or for too long.
    """
    from huggingface_hub.errors import HfHubHTTPError

    for tries in range(1, MAX_TRIES):
        try:
            return call()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status not in PASSING:
                raise
            wait(status, error.response.headers, tries, what)
    return call()


def wait(status: int, headers: Mapping[str, str], tries: int, what: str) -> None:
    """Waits before the next try for as long as the answer asks."""
    delay = delay_s(headers, tries)
    print(
        f"{what}: the Hub answers with status {status}; trying again in {delay:.0f} s",
        file=sys.stderr,
    )
    time.sleep(delay)


def delay_s(headers: Mapping[str, str], tries: int) -> float:
    """The seconds to wait: as many as the answer says, else 1, 2, 4 and so on."""
    asked = headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        return min(float(asked[:9]), MAX_DELAY_S)
    if asked:
        try:
            until = parsedate_to_datetime(asked)
        except ValueError:
            return float(2 ** (tries - 1))
        left = (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        return min(max(left, 0.0), MAX_DELAY_S)
    reset = _RESET.search(headers.get("ratelimit", ""))
    return min(float(reset[1]), MAX_DELAY_S) if reset else float(2 ** (tries - 1))


_CHUNK_BYTES = 1 << 20
_LOCK_WAIT_S = 0.2
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HASH = re.compile(rf"{_SHA256.pattern}|[0-9a-f]{{40}}")

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
        """The file in which the cache has the first part until the rest has come."""
        return self.content.with_name(f"{self.etag}.incomplete")

    @property
    def part_bytes(self) -> int:
        """The number of bytes of the first part."""
        return self.part.stat().st_size if self.part.exists() else 0

    def new_digest(self) -> Any:
        """A new hash of the kind that the Hub lists."""
        if _SHA256.fullmatch(self.etag):
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False)


class Part:
    """The part of a file that the cache holds so far, and its hash.

    Args:
        file: The file.
        stream: The open part.
        on_bytes: Called with the number of bytes that were read or written, and with a negative number
            for those that were dropped.

    Attributes:
        file: The file.
        nbytes: How many bytes there are.
    """

    def __init__(self, file: RemoteFile, stream: BinaryIO, on_bytes: OnBytes):
        self.file = file
        self.nbytes = 0
        self._stream = stream
        self._on_bytes = on_bytes
        self._digest = file.new_digest()

    @property
    def hash(self) -> str:
        """The hash of the bytes so far."""
        return str(self._digest.hexdigest())

    def read_again(self) -> None:
        """Hashes what an earlier process left."""
        if self.file.part_bytes > self.file.nbytes:
            self._stream.truncate(0)
        while chunk := self._stream.read(_CHUNK_BYTES):
            self._count(chunk)

    def restart(self) -> None:
        """Drops all bytes."""
        self._on_bytes(-self.nbytes)
        self._stream.seek(0)
        self._stream.truncate()
        self.nbytes, self._digest = 0, self.file.new_digest()

    def write(self, chunk: bytes) -> None:
        """Adds bytes.

        Raises:
            DownloadError: The file would become longer than the Hub lists.
        """
        if self.nbytes + len(chunk) > self.file.nbytes:
            raise DownloadError(
                f"[load] '{self.file.name}' must have {self.file.nbytes} bytes, as the Hub lists, but "
                "more are sent. Try again."
            )
        rest = memoryview(chunk)
        # an unbuffered stream may take a part of it
        while rest:
            rest = rest[self._stream.write(rest) :]
        self._count(chunk)

    def _count(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.nbytes += len(chunk)
        self._on_bytes(len(chunk))


@contextmanager
def locked_part(file: RemoteFile) -> Iterator[BinaryIO | None]:
    """Yields the first part of a file to write to; `None` if another process has finished the file."""
    while not file.content.exists():
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(file.part, flags, 0o644), "r+b", buffering=0) as stream:
            _lock(stream, file)
            # in the meantime another process may have finished or deleted the part
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
    is_reported = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_reported:
                print(f"[load] another process downloads '{file.name}'; waiting", file=sys.stderr)
                is_reported = True
            time.sleep(_LOCK_WAIT_S)
        except OSError:
            # some network disks have no locks
            return


MAX_BYTES = 50 * 10**9
"""Larger files are left to `huggingface_hub`, since the Hub does not send them over plain HTTP."""

_WORKERS = 4
_WAIT_S, _MAX_WAIT_S = 0.2, 8


def fetch_missing(snapshot: Callable[..., Any], repository: str, repo_type: str | None) -> None:
    """Downloads the files of a snapshot that are missing in the Hub's cache.

    Without a network it does nothing: the caller then reports that, or finds all files in the cache.

    Args:
        snapshot: `huggingface_hub.snapshot_download` for the wanted files, which `dry_run` lists.
        repository: The repository id `owner/name`.
        repo_type: `"dataset"`; `None` for a model.

    Raises:
        DownloadError: A file does not have the hash that the Hub lists.
        HTTPError, OSError: The Hub or the disk fails.
    """
    from huggingface_hub.utils import are_progress_bars_disabled

    files = _missing_files(snapshot, repository, repo_type)
    if not files:
        return
    folder = files[0].content.parent
    folder.mkdir(parents=True, exist_ok=True)
    done = sum(min(file.part_bytes, file.nbytes) for file in files)
    total = sum(file.nbytes for file in files)
    check_space(folder, total - done)
    is_stopped = threading.Event()
    is_shown = not are_progress_bars_disabled()
    with Progress(f"downloading {len(files)} files", total, "B", is_shown=is_shown) as bar:

        def update(count: int) -> None:
            if is_stopped.is_set():
                raise OSError("the download was stopped")
            bar.update(count)

        with ThreadPoolExecutor(_WORKERS) as pool:
            try:
                for fetched in [pool.submit(_fetch, file, update) for file in files]:
                    fetched.result()
            except BaseException:
                # the other threads stop at their next chunk and keep what they have
                is_stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _missing_files(
    snapshot: Callable[..., Any], repository: str, repo_type: str | None
) -> list[RemoteFile]:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import DryRunError

    try:
        listed = snapshot(dry_run=True)
    except DryRunError:
        return []
    files: dict[str, RemoteFile] = {}
    for file in listed:
        if not file.will_download:
            continue
        url = hf_hub_url(repository, file.filename, repo_type=repo_type, revision=file.commit_hash)
        metadata = patiently(partial(get_hf_file_metadata, url), f"[load] '{file.filename}'")
        etag, nbytes = metadata.etag or "", metadata.size
        if _HASH.fullmatch(etag) and nbytes is not None and nbytes <= MAX_BYTES:
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
            # the server sends whole files only, or the first part is damaged
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
                for chunk in answer.iter_bytes():
                    part.write(chunk)
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

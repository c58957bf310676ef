"""Opens regular files for reading, and refuses links that lead out of a model's folder.

A link in a folder that came from a stranger may lead to any file of the user. The content of that file
would then be converted, copied or uploaded. So a link is followed only if it stays in its folder, or
leads from a snapshot of the Hub's cache to the content that the cache keeps for it. A hard link has no
target to check: it is the file itself under a second name, and only someone with rights to the file can
make one.
"""

import codecs
import os
import re
import stat
from io import BufferedReader
from pathlib import Path

UNREADABLE = "Check the file and its permissions, or fetch it again."
"""The way out where the system cannot read a file."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_REPOSITORY = re.compile(r"(models|datasets)--.+", re.DOTALL)
# several repositories of a cache may share one content
_SHARED_CONTENT = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(file: Path) -> BufferedReader:
    """Opens a file that the user named, and never waits for a pipe or a device.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is a pointer of Git LFS.
    """
    _check_kind(os.stat(file).st_mode)
    # it may have become a pipe by now, at which a plain open would wait
    stream = open(file, "rb", opener=_open_at_once)  # noqa: SIM115, the caller closes it
    try:
        _check_kind(os.fstat(stream.fileno()).st_mode)
        if stream.peek(len(_POINTER)).startswith(_POINTER):
            raise OSError(
                "it is a pointer of Git LFS in place of the file itself, which was not fetched; run "
                "'git lfs pull' in its repository, or download the file"
            )
    except BaseException:
        stream.close()
        raise
    return stream


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def open_member(file: Path) -> BufferedReader:
    """Opens a file of a model's folder.

    Raises:
        OSError: As for `open_file`, or the file is a link that leaves the folder.
    """
    check_link(file)
    return open_file(file)


def read_file(file: Path, max_bytes: int) -> bytes:
    """The content of a file that the user named.

    Raises:
        OSError: As for `open_file`, or the file has more than `max_bytes`.
    """
    with open_file(file) as stream:
        return _read(stream, max_bytes)


def read_text(file: Path, max_bytes: int) -> str:
    """The text of a file that the user named, without a byte-order mark.

    Raises:
        OSError: As for `read_file`, or the file is not UTF-8.
    """
    try:
        return decode_text(read_file(file, max_bytes))
    except ValueError as error:
        raise OSError(f"it {error}") from error


def read_member(file: Path, max_bytes: int) -> bytes:
    """The content of a file of a model's folder.

    Raises:
        OSError: As for `open_member`, or the file has more than `max_bytes`.
    """
    with open_member(file) as stream:
        return _read(stream, max_bytes)


def decode_text(data: bytes) -> str:
    """The text of a file, without the byte-order mark that some programs write before it.

    Raises:
        ValueError: It is not UTF-8. The message is a clause without a subject, to be put after the name
            of the text.
    """
    check_not_utf16(data)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"must be UTF-8 but is not at byte {error.start}") from error


def check_not_utf16(data: bytes) -> None:
    """Refuses a text that begins with the byte-order mark of UTF-16.

    Raises:
        ValueError: It does. The message is as that of `decode_text`.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("must be UTF-8 but is UTF-16")


def check_link(file: Path) -> None:
    """Refuses a link that leads out of its folder.

    Raises:
        OSError: The link leads out of its folder.
    """
    folder = Path(os.path.realpath(file.parent))
    target = Path(os.path.realpath(folder / file.name))
    if target.is_relative_to(folder) or _is_cached_content(folder, target):
        return
    raise OSError(
        f"it is a link to '{target}', outside of its folder; put the file itself there, or give the "
        "folder that holds it"
    )


def _is_cached_content(folder: Path, target: Path) -> bool:
    """Whether a snapshot of the Hub's cache, or a folder in it, may link to a file."""
    snapshot = folder if folder.parent.name == "snapshots" else folder.parent
    repository = snapshot.parent.parent
    if snapshot.parent.name != "snapshots" or not _REPOSITORY.fullmatch(repository.name):
        return False
    shared = repository.parent / "blobs"
    return target.parent == repository / "blobs" or (
        target.is_relative_to(shared)
        and _SHARED_CONTENT.fullmatch(target.relative_to(shared).as_posix()) is not None
    )


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(f"it is {kind}, not a regular file")


def _read(stream: BufferedReader, max_bytes: int) -> bytes:
    size = os.fstat(stream.fileno()).st_size
    # one byte more than expected shows that the file grows
    data = stream.read(size + 1) if size <= max_bytes else b""
    size = max(size, len(data))
    if size > max_bytes:
        raise OSError(
            f"it has {size:,} bytes, more than the {max_bytes:,} that such a file may have"
        )
    return data

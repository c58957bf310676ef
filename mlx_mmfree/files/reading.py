"""Reads small files from untrusted sources: regular files within their folder, texts and JSON.

A link in a folder that came from a stranger may lead to any file of the user. The content of that file
would then be converted, copied or uploaded. So a link is followed only if it stays in its folder, or
leads from a snapshot of the Hub's cache to the content that the cache keeps for it. A hard link has no
target to check: it is the file itself under a second name, and only someone with rights to the file can
make one.

The package `json` has no limits. Here the length of the text, the number and depth of its values and
the size of its numbers are bounded.
"""

import codecs
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checkpoint_files import TOKENIZER_PATTERNS


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` replaced by the home folder. The name of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))


def visible(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose names match, sorted, without hidden ones.

    On exFAT and network drives macOS writes a hidden `._name` beside each file, of another kind.
    """
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def real_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path with all links followed. A loop of links stays, and fails when it is opened."""
    return Path(os.path.realpath(expanded(path)))


UNREADABLE = "Check the file and its permissions, or fetch it again."
"""The hint where the system cannot read a file."""

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


def open_file(file: Path, *, is_member: bool = False) -> BufferedReader:
    """Opens a file, and never waits for a pipe or a device.

    Args:
        file: The file.
        is_member: Whether it is a file of a model's folder, and not one that the user named.

    Raises:
        OSError: The file cannot be read, is not a regular file, is a pointer of Git LFS, or as a member
            is a link that leaves its folder.
    """
    if is_member:
        check_link(file)
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        # whoever reports it names the file
        raise type(error)(error.strerror) from error
    if not stat.S_ISREG(mode):
        raise _wrong_kind(mode)
    # it may have become a pipe by now, at which a plain open would wait
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            raise _wrong_kind(mode)
        stream = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    if stream.peek(len(_POINTER)).startswith(_POINTER):
        stream.close()
        raise OSError(
            "it is a pointer of Git LFS in place of the file itself, which was not fetched; run "
            "'git lfs pull' in its repository, or download the file"
        )
    return stream


def read_file(file: Path, max_bytes: int, *, is_member: bool = False) -> bytes:
    """The content of a file.

    Raises:
        OSError: As for `open_file`, or the file has more than `max_bytes`.
    """
    with open_file(file, is_member=is_member) as stream:
        size = os.fstat(stream.fileno()).st_size
        # one byte more than expected shows that the file grows
        data = stream.read(size + 1) if size <= max_bytes else b""
    size = max(size, len(data))
    if size > max_bytes:
        raise OSError(
            f"it has {size:,} bytes, more than the {max_bytes:,} that such a file may have"
        )
    return data


def read_text(file: Path, max_bytes: int) -> str:
    """The text of a file that the user named, without a byte-order mark.

    Raises:
        OSError: As for `read_file`, or the file is not UTF-8.
    """
    try:
        return decode_text(read_file(file, max_bytes))
    except ValueError as error:
        raise OSError(f"it {error}") from error


def decode_text(data: bytes) -> str:
    """The text of a file, without the byte-order mark that some programs write before it.

    Raises:
        ValueError: It is not UTF-8. The message is a clause without a subject, to be put after the name
            of the text.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        check_not_utf16(data)
        raise ValueError(f"must be UTF-8 but is not at byte {error.start}") from error


def check_not_utf16(data: bytes) -> None:
    """Refuses a text that begins with the byte-order mark of UTF-16.

    Raises:
        ValueError: It does. The message is the one of `decode_text`.
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
    """Returns whether a snapshot of the Hub's cache, or a folder within it, may link to a file."""
    snapshots = next((each for each in folder.parents if each.name == "snapshots"), None)
    if snapshots is None or not _REPOSITORY.fullmatch(snapshots.parent.name):
        return False
    repository = snapshots.parent
    shared = repository.parent / "blobs"
    return target.parent == repository / "blobs" or (
        target.is_relative_to(shared)
        and _SHARED_CONTENT.fullmatch(target.relative_to(shared).as_posix()) is not None
    )


def _wrong_kind(mode: int) -> OSError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return OSError(f"it is {kind}, not a regular file")


MAX_BYTES = 16_000_000
MAX_VALUES = 1_000_000
MAX_DEPTH = 64
MAX_DIGITS = 40

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    unique_keys: bool = False,
    finite: bool = True,
    infinite_keys: Collection[str] = (),
) -> Any:
    """Parses one JSON value.

    Args:
        text: UTF-8 text. A byte-order mark before it does not count.
        max_bytes: The largest length of the text.
        max_values: The largest number of values; lists and objects count too.
        unique_keys: Refuse repeated keys; otherwise the last one counts.
        finite: Refuse `NaN`, `Infinity` and numbers that are read as infinity.
        infinite_keys: Keys of the whole object that may hold `Infinity`, or a list with it, even so.

    Raises:
        ValueError: The text is not JSON or goes beyond a limit. The message is a clause without a
            subject, to be put after the name of the text.
    """
    if len(text) > max_bytes:
        raise ValueError(f"must have at most {max_bytes:,} bytes but has {len(text):,}")
    # each value but the first follows one of these, so that memory is bounded before it is taken
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > max_values:
        raise ValueError(f"must hold at most {max_values:,} values but has about {values:,}")
    hooks: dict[str, Any] = {"parse_int": _whole}
    if unique_keys:
        hooks["object_pairs_hook"] = _without_repeats
    found: list[str] = []
    if finite:
        refuse = found.append if infinite_keys else _refuse_constant
        hooks |= {"parse_float": _finite, "parse_constant": lambda name: refuse(name) or math.inf}
    try:
        value = json.loads(decode_text(text), **hooks)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON but is not: {error}") from error
    except RecursionError as error:
        raise ValueError(f"must be nested at most {MAX_DEPTH} deep") from error
    if found:
        _check_infinite(value, found, infinite_keys)
    # a text that is escaped as half a pair cannot be encoded as UTF-8
    has_surrogates = _ESCAPED_SURROGATE.search(text) is not None
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        if has_surrogates and any(map(_has_surrogate, level)):
            raise ValueError("must hold valid Unicode but has half of a surrogate pair")
        entries = (
            entry for part in level for entry in (part.values() if isinstance(part, dict) else part)
        )
        level = [entry for entry in entries if isinstance(entry, (dict, list))]
        if not level:
            return value
    raise ValueError(f"must be nested at most {MAX_DEPTH} deep")


def _check_infinite(value: Any, found: list[str], keys: Collection[str]) -> None:
    """Refuses constants other than `Infinity`, and that one under another key."""
    given = [value.get(key) for key in keys] if isinstance(value, dict) else []
    known = [part for each in given for part in (each if isinstance(each, list) else [each])]
    for name in found:
        if name != "Infinity" or known.count(math.inf) != len(found):
            _refuse_constant(name)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"must name each key once but repeats {name!r:.100}")
    return result


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"must have numbers of at most {MAX_DIGITS} digits but got {digits:.20}…")
    return int(digits)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"must have finite numbers but got {text:.40}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"must have finite numbers but got {name}")


def _has_surrogate(part: dict[str, Any] | list[Any]) -> bool:
    values = (*part, *part.values()) if isinstance(part, dict) else part
    return any(isinstance(text, str) and _LONE_SURROGATE.search(text) for text in values)


_HINT = "Correct the file, or fetch it again."

INFINITE_KEYS = ("time_step_limit",)
"""Keys under which published files hold `Infinity`, as descriptions of Mamba-2 do."""


def parse_json_object(
    text: bytes,
    what: str,
    *,
    unique: bool = True,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    infinite_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        text: UTF-8 text.
        what: What the text is, for messages.
        unique: Refuse repeated keys; otherwise the last one counts.
        max_bytes, max_values, infinite_keys: As for `parse_json`.

    Raises:
        CheckpointError: The text is not JSON, not an object, or beyond the limits of `parse_json`.
    """
    try:
        value = parse_json(
            text,
            unique_keys=unique,
            max_bytes=max_bytes,
            max_values=max_values,
            infinite_keys=infinite_keys,
        )
    except ValueError as error:
        raise CheckpointError(f"[JSON] {what} {error}. {_HINT}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"[JSON] {what} must be an object but got {type(value).__name__} {value!r:.80}. {_HINT}"
        )
    return value


def read_json_object(file: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Reads a file that holds one JSON object; of repeated keys the last one counts.

    Args:
        file: The file.
        is_optional: Whether a missing file stands for an empty object.

    Raises:
        CheckpointError: The file is missing, too long, not a JSON object, or a link out of its folder.
    """
    if not file.exists():
        if is_optional:
            return {}
        raise CheckpointError(f"[JSON] '{file}' must be a file but is missing. {_HINT}")
    try:
        text = read_file(file, MAX_BYTES, is_member=True)
    except OSError as error:
        raise CheckpointError(f"[JSON] '{file}' cannot be read: {error}. {UNREADABLE}") from error
    value = parse_json_object(text, f"'{file}'", unique=False, infinite_keys=INFINITE_KEYS)
    return {key: with_floats(each) for key, each in value.items()}


_FLOAT_TAG = "__float__"
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""The numbers that JSON lacks. transformers and mlx-lm read each as an object with this tag too."""


def with_floats(value: Any) -> Any:
    """A JSON value in which tagged floats are floats."""
    if isinstance(value, list):
        return [with_floats(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT_TAG} and value[_FLOAT_TAG] in (*_FLOATS,):
        return _FLOATS[value[_FLOAT_TAG]]
    return {key: with_floats(each) for key, each in value.items()}


def _with_tags(value: Any) -> Any:
    """A JSON value in which floats that JSON lacks are tagged."""
    if isinstance(value, list | tuple):
        return [_with_tags(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_tags(each) for key, each in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return {_FLOAT_TAG: name}


def json_text(value: Any, **options: Any) -> str:
    """A value as JSON, also where it holds infinity or NaN, which `read_json_object` reads back.

    Args:
        value: The value.
        options: As of `json.dumps`.
    """
    return json.dumps(_with_tags(value), allow_nan=False, **options)


def write_json(file: Path, value: Any) -> None:
    """Writes JSON with sorted keys."""
    file.write_text(json_text(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tokenizer_files(source: Path) -> dict[str, Path]:
    """The files of a checkpoint apart from its weights, by their paths in its folder.

    `config.json` is one of them.

    Raises:
        CheckpointError: A folder of such files is a link out of the checkpoint's.
    """
    for folder in {pattern.partition("/")[0] for pattern in TOKENIZER_PATTERNS if "/" in pattern}:
        try:
            check_link(source / folder)
        except OSError as error:
            raise CheckpointError(
                f"[tokenizer] '{source / folder}' cannot be read: {error}."
            ) from error
    found = (file for pattern in TOKENIZER_PATTERNS for file in sorted(source.glob(pattern)))
    return {file.relative_to(source).as_posix(): file for file in found if file.is_file()}

"""JSON objects among the files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .json_reader import MAX_BYTES, MAX_VALUES, parse_json
from .opening import UNREADABLE, read_member

_WAY_OUT = "Correct the file, or fetch it again."


def parse_json_object(
    text: bytes,
    place: str,
    *,
    unique: bool = True,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        text: UTF-8 text.
        place: What the text is, for messages.
        unique: Refuse repeated keys; otherwise the last one counts.
        max_bytes, max_values: As for `parse_json`.

    Raises:
        CheckpointError: The text is not JSON, not an object, or beyond the limits of `parse_json`.
    """
    try:
        value = parse_json(text, unique_keys=unique, max_bytes=max_bytes, max_values=max_values)
    except ValueError as error:
        raise CheckpointError(f"[JSON] {place} {error}. {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"[JSON] {place} must be an object but got {type(value).__name__} {value!r:.80}. "
            f"{_WAY_OUT}"
        )
    return value


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object; of repeated keys the last one counts.

    Raises:
        CheckpointError: The file is missing, too long, not a JSON object, or a link out of its folder.
    """
    if not file.exists():
        raise CheckpointError(f"[JSON] '{file}' must be a file but is missing. {_WAY_OUT}")
    try:
        text = read_member(file, MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"[JSON] '{file}' cannot be read: {error}. {UNREADABLE}") from error
    return parse_json_object(text, f"'{file}'", unique=False)


def write_json(file: Path, value: Any) -> None:
    """Writes JSON with sorted keys."""
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")

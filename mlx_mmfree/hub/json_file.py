"""Reads JSON from untrusted sources."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MAX_BYTES = 64_000_000


def _without_repeats(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise CheckpointError(f"[JSON] {place} must name each key once but repeats {name!r:.100}.")
    return result


def parse_json_object(text: bytes, place: str, *, unique: bool = True) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        text: UTF-8 text.
        place: What is parsed, for messages.
        unique: Refuse repeated keys; otherwise the last one counts.

    Raises:
        CheckpointError: The text is not UTF-8, not JSON, or not an object.
    """
    hook = (lambda pairs: _without_repeats(place, pairs)) if unique else None
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"[JSON] {place} must be JSON but is not: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"[JSON] {place} must be an object but got {type(value).__name__} {value!r:.80}."
        )
    return value


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object; of repeated keys the last one counts.

    Raises:
        CheckpointError: The file is missing, too long, or not a JSON object.
    """
    if not file.is_file():
        raise CheckpointError(f"[JSON] '{file}' must be a file but is missing.")
    try:
        with open(file, "rb") as stream:
            text = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"[JSON] '{file}' cannot be read: {error}.") from error
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"[JSON] '{file}' must have at most {MAX_BYTES} bytes.")
    return parse_json_object(text, f"'{file}'", unique=False)

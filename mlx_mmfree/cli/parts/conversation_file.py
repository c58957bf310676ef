"""Conversations in files: one object `{"messages": [...]}` in JSON, a line of `mmfree lora --data`."""

import json
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files.reading import read_json_object
from ...files.writing import new_file, writing

ROLES = ("system", "user", "assistant")


def write_conversation(file: Path, messages: list[dict[str, str]]) -> None:
    """Writes messages, each with `role` and `content`. The file appears whole or not at all.

    Raises:
        UsageError: There is no message yet.
        OSError: The file cannot be written.
    """
    if not messages:
        raise UsageError("[chat] there is no message to save yet.")
    with writing("chat", file), new_file(file) as new:
        text = json.dumps({"messages": messages}, ensure_ascii=False)
        new.write_text(f"{text}\n", encoding="utf-8")


def read_conversation(file: Path) -> list[dict[str, str]]:
    """Reads what `write_conversation` wrote.

    Raises:
        UsageError: There is no such file, or it does not hold a conversation.
        MMFreeError: The file cannot be read or is no JSON.
    """
    if not file.exists():
        raise UsageError(f"[chat] there is no file '{file}'. Name one that /save wrote.")
    messages = read_json_object(file).get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(
            f"[chat] '{file}' must hold \"messages\", each with a role of {', '.join(ROLES)} and a text "
            "as content, but does not. Name a file that /save wrote."
        )
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ROLES
        and isinstance(value.get("content"), str)
    )

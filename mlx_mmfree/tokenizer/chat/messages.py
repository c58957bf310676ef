"""Messages of a conversation as plain data, which is all that a chat template sees."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...errors import UsageError

_MAX_DEPTH = 100


def chat_data(
    messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of everything that a template may read, by name.

    Args:
        messages: The conversation.
        add_generation_prompt: Whether the text is to end where the model's answer begins.
        variables: Further names for the template.

    Raises:
        UsageError: A message has no role, or a value is not plain data.
    """
    data = copy_data({**variables, "messages": _checked_messages(messages)})
    return {**data, "add_generation_prompt": bool(add_generation_prompt)}


def copy_data(data: Mapping[str, Any], change: Callable[[str], str] = str) -> dict[str, Any]:
    """A copy of nested plain data in which every text is changed.

    Args:
        data: Values by the names of the arguments that they were given as.
        change: Makes the text of the copy from a text.

    Raises:
        UsageError: A value holds anything but texts, numbers, lists and dictionaries, or is nested too
            deeply.
    """
    return {name: _copy(value, name, change, depth=1) for name, value in data.items()}


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item)


def _copy(value: Any, name: str, change: Callable[[str], str], depth: int) -> Any:
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"[apply_chat_template] '{name}' must be nested at most {_MAX_DEPTH} deep but goes deeper. "
            "Make it flatter."
        )
    if isinstance(value, Mapping):
        return {
            _copy(key, name, change, depth + 1): _copy(item, name, change, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy(item, name, change, depth + 1) for item in value]
    raise UsageError(
        f"[apply_chat_template] '{name}' must hold only texts, numbers, lists and dictionaries but got "
        f"{type(value).__name__}. Convert it first."
    )


def _checked_messages(messages: Any) -> list[Any]:
    if isinstance(messages, (list, tuple)) and messages:
        if all(isinstance(message, Mapping) and "role" in message for message in messages):
            return list(messages)
        messages = next(m for m in messages if not (isinstance(m, Mapping) and "role" in m))
    raise UsageError(
        "[apply_chat_template] 'messages' must be a list of at least one object with 'role' and "
        f"'content' but got {messages!r:.60}. Write them as [{{'role': 'user', 'content': '…'}}]."
    )

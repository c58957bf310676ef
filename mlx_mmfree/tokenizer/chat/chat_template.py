"""Chat templates: Jinja programs that come with a checkpoint and write out a conversation."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UsageError
from ...platform.confinement import ConfinedProcess, LimitError

CPU_SECONDS = 2.0
MEMORY_BYTES = 256 * 2**20
MAX_CHARACTERS = 8 * 2**20
_MAX_DEPTH = 100

_renderer = ConfinedProcess(
    "mlx_mmfree.tokenizer.chat.template_server", ("jinja2", "markupsafe"), MEMORY_BYTES
)


class ChatTemplate:
    """One chat template.

    Args:
        source: the Jinja source.
        folder: where it was read, for messages.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source = source
        self._folder = folder

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            variables: ``messages``, ``add_generation_prompt`` and whatever else the template
                reads.

        Raises:
            UsageError: the template refuses the messages.
            CheckpointError: the template is faulty, takes too long or writes too much.
        """
        names = {"tools": None, "documents": None} | dict(variables)
        try:
            answer = _renderer.ask((self.source, names, MAX_CHARACTERS), CPU_SECONDS)
        except LimitError as error:
            raise self._fault(str(error)) from error
        if "refused" in answer:
            raise UsageError(f"The chat template refuses the messages: {answer['refused']}")
        if "text" not in answer:
            raise self._fault(answer["fault"], answer.get("line"))
        return str(answer["text"])

    def _fault(self, reason: str, line: int | None = None) -> CheckpointError:
        place = "" if line is None else f" in line {line}"
        return CheckpointError(
            f"The chat template of '{self._folder}' cannot be used{place} ({reason}). "
            "Correct it, or encode a plain prompt instead."
        )


def copy_data(value: Any, change: Callable[[str], str] = str, depth: int = 0) -> Any:
    """A copy of nested plain data with every text changed; templates see nothing else.

    Raises:
        UsageError: something is neither text, number, list nor dictionary, or lies very deep.
    """
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"[apply_chat_template] 'messages' must be nested at most {_MAX_DEPTH} deep but go deeper."
        )
    if isinstance(value, Mapping):
        return {
            copy_data(key, change, depth + 1): copy_data(item, change, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [copy_data(item, change, depth + 1) for item in value]
    raise UsageError(
        "[apply_chat_template] 'messages' must hold only texts, numbers, lists and dictionaries "
        f"but got {type(value).__name__}."
    )


def texts_in(value: Any) -> Iterator[str]:
    """Every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(key)
            yield from texts_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item)

"""Chat templates: Jinja programs that come with a checkpoint and write out a conversation."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from ..errors import CheckpointError, UsageError
from .template_limits import MAX_CHARACTERS, TemplateLimitError, limited
from .template_sandbox import ChatEnvironment, RefusedMessagesError


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
        template = self._template
        pieces = []
        size = 0
        try:
            with limited():
                for piece in template.generate(names):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_CHARACTERS:
                        raise TemplateLimitError(f"it writes over {MAX_CHARACTERS} characters")
        except RefusedMessagesError as error:
            reason = _one_line(error)
            raise UsageError(f"The chat template refuses the messages: {reason}") from error
        except Exception as error:
            raise self._fault(error) from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> Template:
        try:
            with limited():
                return ChatEnvironment().from_string(self.source)
        except Exception as error:
            raise self._fault(error) from error

    def _fault(self, error: Exception) -> CheckpointError:
        place = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        kind = "" if isinstance(error, TemplateLimitError) else f"{type(error).__name__}: "
        return CheckpointError(
            f"The chat template of '{self._folder}' cannot be used{place} ({kind}"
            f"{_one_line(error)}). Correct it, or encode a plain prompt instead."
        )


def copy_data(value: Any, change: Callable[[str], str] = str) -> Any:
    """A copy of nested plain data with every text changed; templates see nothing else.

    Raises:
        UsageError: something is neither text, number, list nor dictionary.
    """
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {copy_data(key, change): copy_data(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_data(item, change) for item in value]
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


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]

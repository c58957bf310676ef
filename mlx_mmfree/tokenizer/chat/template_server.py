"""Renders chat templates inside the confined process."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError

from .template_sandbox import ChatEnvironment, RefusedMessagesError

_MAX_MESSAGE = 300


def handle(request: tuple[str, Mapping[str, Any], int]) -> dict[str, Any]:
    """Renders a template.

    Args:
        request: The source, the values that it reads by name, and how many characters it may write.

    Returns:
        One of three answers: `text`; `refused`, what the template says of the messages; or `fault`, why
        the template cannot be used, with the `line` if that is known.
    """
    source, names, limit = request
    try:
        return _rendered(source, names, limit)
    except RefusedMessagesError as error:
        return {"refused": _one_line(error)}
    except MemoryError:
        raise
    except Exception as error:
        fault: dict[str, Any] = {"fault": f"{type(error).__name__}: {_one_line(error)}"}
        return fault | ({"line": error.lineno} if isinstance(error, TemplateSyntaxError) else {})


def _rendered(source: str, names: Mapping[str, Any], limit: int) -> dict[str, Any]:
    pieces = []
    size = 0
    for piece in _compiled(source).generate(names):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            return {"fault": f"it writes over {limit} characters"}
    return {"text": "".join(pieces)}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return ChatEnvironment().from_string(source)


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:_MAX_MESSAGE]

"""Renders chat templates inside the confined process, which limits their time and memory.

A Jinja environment limits what templates from untrusted sources can reach.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STR_METHODS = _names(
    """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
    removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper
    """
)
_DICT_METHODS = _names("copy get items keys values")
_LIST_METHODS = _names("copy count index")


class RefusedMessagesError(Exception):
    """The template called `raise_exception`."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any = "") -> None:
    raise RefusedMessagesError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, the tag around what the model writes, and writes its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControls, _GenerationTag]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Returns whether a template may read an attribute. Each plain type has a short list of them."""
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, Mapping):
            return attr in _DICT_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _LIST_METHODS
        known = (Namespace, LoopContext, Macro, Cycler, Joiner, Undefined)
        return isinstance(obj, known) and super().is_safe_attribute(obj, attr, value)


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
    chunks = []
    size = 0
    for chunk in _compiled(source).generate(names):
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            return {"fault": f"it writes over {limit} characters"}
    return {"text": "".join(chunks)}


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return ChatEnvironment().from_string(source)


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:_MAX_MESSAGE]

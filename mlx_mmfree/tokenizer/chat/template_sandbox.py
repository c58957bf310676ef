"""A Jinja environment that limits what chat templates from untrusted sources can reach.

The process that it runs in limits their time and memory.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
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
    """Accepts `{% generation %}`, which marks what the model writes, and writes its body."""

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
        """Whether a template may read an attribute. Each plain type has a short list of them."""
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, Mapping):
            return attr in _DICT_METHODS
        if isinstance(obj, (list, tuple)):
            return attr in _LIST_METHODS
        known = (Namespace, LoopContext, Macro, Cycler, Joiner, Undefined)
        return isinstance(obj, known) and super().is_safe_attribute(obj, attr, value)

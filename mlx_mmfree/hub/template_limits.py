"""What a chat template may use: time, and characters in every value that it makes.

The checks look at an operation's arguments and refuse it before it makes something huge.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from string import Formatter
from typing import Any

TIME_LIMIT_S = 1.0
MAX_CHARACTERS = 8 * 2**20
MAX_OUTPUT_CHARACTERS = 4 * MAX_CHARACTERS
_MAX_INTEGER_BITS = 4096
_ENTRY_CHARACTERS = 32
_MAX_INDENT = 16
_MAX_PRECISION = 100
_MAX_WIDTH = 1000
_LONG_NUMBER = re.compile(r"\d{4}")
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*(?:\d{4}|\*)")


class TemplateLimitError(Exception):
    """A template went beyond what a chat template may use."""


class _Budget:
    def __init__(self) -> None:
        self._deadline = time.thread_time() + TIME_LIMIT_S
        self._characters = MAX_OUTPUT_CHARACTERS

    def spend(self, characters: int = 0) -> None:
        self._characters -= characters
        if self._characters < 0:
            raise TemplateLimitError(f"it writes over {MAX_OUTPUT_CHARACTERS} characters")
        if time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it runs for over {TIME_LIMIT_S:g} seconds")


_budget: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Gives the templates that the block compiles or renders a fresh budget of time and size."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def spend(characters: int = 0) -> None:
    """Checks the time and counts characters that are written."""
    budget = _budget.get()
    if budget is not None:
        budget.spend(characters)


def check_size(characters: int) -> None:
    """Refuses a value of too many characters."""
    if characters > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a value of over {MAX_CHARACTERS} characters")


def weigh(*values: Any) -> int:
    """Characters that the values take when written out, nested parts as often as they occur."""
    total = 0
    stack = list(values)
    while stack:
        value = stack.pop()
        total += len(value) if isinstance(value, (str, bytes)) else _ENTRY_CHARACTERS
        if isinstance(value, Mapping):
            stack += value.keys()
            stack += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack += value
        check_size(total + len(stack))
    return total


def check_format(text: str, *values: Any, **named: Any) -> None:
    """Looks at ``text.format(*values)``."""
    specs = [spec or "" for _, _, spec, _ in Formatter().parse(text)]
    if any("{" in spec or _LONG_NUMBER.search(spec) for spec in specs):
        raise TemplateLimitError("it asks for a very wide format field")
    check_size(len(text) + len(specs) * (weigh(*values, *named.values()) + _MAX_WIDTH))


def check_percent(text: Any, *values: Any, **named: Any) -> None:
    """Looks at ``text % values``."""
    text = str(text)
    if _WIDE_PERCENT.search(text):
        raise TemplateLimitError("it asks for a very wide format field")
    check_size(len(text) + text.count("%") * (weigh(*values, *named.values()) + _MAX_WIDTH))


def check_precision(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
        raise TemplateLimitError("it rounds to very many digits")


def check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def check_join(entries: Any, d: Any = "", *_: Any, **__: Any) -> None:
    check_size(weigh(entries) + len(entries) * len(str(d)))


def check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    lines = str(text).count("\n") + 1
    check_size(lines * (len(width) if isinstance(width, str) else int(width)))


def check_json(value: Any, *options: Any, **named: Any) -> None:
    for option in (*options, *named.values()):
        too_long = len(option) > _MAX_INDENT if isinstance(option, (str, list, tuple)) else False
        if too_long or (isinstance(option, int) and option > _MAX_INDENT):
            raise TemplateLimitError("it asks for a very wide indentation")


def check_entries(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        check_size(len(value) * _ENTRY_CHARACTERS)


def check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = (
            left.bit_length() + right.bit_length()
            if operator == "*"
            else left.bit_length() * max(right, 0)
        )
        if bits > _MAX_INTEGER_BITS:
            raise TemplateLimitError("it computes a number of very many digits")
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                check_size(weigh(value) * max(times, 0))

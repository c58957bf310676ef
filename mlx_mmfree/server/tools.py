"""Finds in what a model writes the calls of tools that it asks for."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..files.reading import parse_json
from ..generation.answer_parts import Part, PartReader, TextDelta, whole_call
from ..generation.decode import overlap


def parsed_call(text: str, arguments: str) -> tuple[str, str] | None:
    """The name and the arguments of the call in a JSON object; `None` if the text is no call.

    Args:
        text: What a model wrote.
        arguments: The key under which it writes the arguments.
    """
    try:
        value = parse_json(text.encode("utf-8"))
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments, {})
    if not isinstance(given, dict):
        return None
    return value["name"], json.dumps(given, ensure_ascii=False)


_PYTHON_TAG = "<|python_tag|>"


class BareCalls:
    """Holds back an answer that begins as a call does, and says at its end what it is.

    Args:
        names: The functions that may be called. An object with another name is an ordinary answer.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def add(self, text: str) -> list[Part]:
        if self._is_text:
            return [TextDelta(text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith("{") or _may_become(begun, _PYTHON_TAG):
            return []
        self._is_text = True
        held, self._held = self._held, ""
        return [TextDelta(held)]

    def finalize(self) -> list[Part]:
        held, self._held = self._held, ""
        call = parsed_call(held.strip().removeprefix(_PYTHON_TAG), "parameters")
        if call is not None and call[0] in self._names:
            return whole_call(*call)
        return [TextDelta(held)] if held else []


def _may_become(text: str, tag: str) -> bool:
    return text.startswith(tag) or tag.startswith(text)


BEGIN, END = "<tool_call>", "</tool_call>"


class TaggedCalls:
    """Finds calls between tags; all other text is the answer's own."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._has_call = False

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while True:
            tag = END if self._inside else BEGIN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            parts += self._call(before) if self._inside else self._text(before)
            self._held = after
            self._inside = not self._inside
        if not self._inside:
            cut = len(self._held) - overlap(self._held, BEGIN)
            parts += self._text(self._held[:cut])
            self._held = self._held[cut:]
        return parts

    def finalize(self) -> list[Part]:
        held, self._held = self._held, ""
        if not self._inside:
            return self._text(held)
        # some models leave out the last tag
        call = parsed_call(held, "arguments")
        return [TextDelta(f"{BEGIN}{held}")] if call is None else whole_call(*call)

    def _call(self, text: str) -> list[Part]:
        call = parsed_call(text, "arguments")
        if call is None:
            return [TextDelta(f"{BEGIN}{text}{END}")]
        self._has_call = True
        return whole_call(*call)

    def _text(self, text: str) -> list[Part]:
        # line breaks between two calls belong to neither
        is_empty = not text or (self._has_call and text.isspace())
        return [] if is_empty else [TextDelta(text)]


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call.

    Attributes:
        begin, end: What stands before and after the JSON object.
        arguments: The key of the arguments in it.
        reader: Makes what finds calls of functions with these names in an answer.
    """

    begin: str
    end: str
    arguments: str
    reader: Callable[[Collection[str]], PartReader]


_TAGGED = CallForm(f"{BEGIN}\n", f"\n{END}", "arguments", lambda names: TaggedCalls())
_BARE = CallForm("", "", "parameters", BareCalls)


def call_form(template: str) -> CallForm | None:
    """The form of calls that a chat template teaches; `None` if none that is known here.

    Args:
        template: The source of the chat template.
    """
    if "tools" not in template or not _spells(template, "name"):
        return None
    if BEGIN in template:
        # others put XML between the same tags
        return _TAGGED if _spells(template, "arguments") else None
    return _BARE if _spells(template, "parameters") else None


def _spells(template: str, key: str) -> bool:
    """Whether a template spells a key of JSON, whose quotes may be escaped in a string."""
    return re.search(rf"""["']{key}\\?["']""", template) is not None

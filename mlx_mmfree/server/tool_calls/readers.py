"""Finds in what a model writes the calls of tools that it asks for, one reader for each form of them."""

import json
import re
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from ...files.reading import parse_json
from ...generation import answer_parts
from ...generation.scanning import Scanner, Steps

Functions = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments of functions by their names."""

_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")


def parsed_call(text: str, key: str) -> tuple[str, str] | None:
    """The name and the arguments of the call in a JSON object; `None` if the text is no call.

    Args:
        text: What a model wrote.
        key: The key under which it writes the arguments.
    """
    try:
        value = parse_json(text.encode("utf-8", "replace"))
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(key, {})
    if not isinstance(given, dict):
        return None
    return value["name"], json.dumps(given, ensure_ascii=False)


class CallReader(Scanner):
    """Finds calls in an answer; all other text is the answer's own.

    A call streams as it is written. What cannot be a call stays text, and a call that breaks off or
    turns out to be no JSON has no end.

    Args:
        functions: Those that may be called.
    """

    def __init__(self, functions: Functions):
        self._functions = functions
        self._blank: list[str] | None = None
        super().__init__()

    def _between(self, text: str) -> None:
        """Hands on text of the answer. Space between two calls belongs to neither."""
        if self._blank is not None:
            self._blank.append(text)
            if not text or text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._say(text)

    def _end_call(self) -> None:
        self._parts.append(answer_parts.ToolCallEnd())
        self._blank = []

    def _arguments(self) -> Generator[None, None, bool]:
        """Streams the JSON object that comes next; whether it was one."""
        pieces: list[str] = []

        def take(text: str) -> None:
            if text:
                pieces.append(text)
                self._parts.append(answer_parts.ToolCallDelta(text))

        is_complete = yield from self._json(take)
        return is_complete and _is_json("".join(pieces))

    def _call(self, key: str) -> Generator[None, None, str | None]:
        """A call that is one JSON object and comes next; its text if it is none, else `None`.

        Args:
            key: Under which the arguments stand.
        """
        spaces = yield from self._head(_SPACE)
        before = "" if spaces is None else spaces[0]
        if (yield from self._next()) != "{":
            return before
        head = yield from self._head(_heads(key))
        if head is not None and self._may_be(head[1]):
            self._parts.append(answer_parts.ToolCallStart(head[1]))
            if (yield from self._arguments()):
                self._end_call()
                yield from self._json(_drop, ["}"])
            return None
        if head is not None:
            self._at = head.start()
        pieces = [before]
        yield from self._json(pieces.append)
        text = "".join(pieces)
        call = parsed_call(text, key)
        if call is None or not self._may_be(call[0]):
            return text
        self._parts += answer_parts.whole_call(*call)
        self._blank = []
        return None

    def _may_be(self, name: str) -> bool:
        """Whether a call of a function of this name is one."""
        return True


def _drop(text: str) -> None:
    pass


def _is_json(text: str) -> bool:
    try:
        parse_json(text.encode("utf-8", "replace"))
    except ValueError:
        return False
    return True


@cache
def _heads(key: str) -> re.Pattern[str]:
    """The beginning of a call, up to its arguments."""
    kind = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
    name = r'"name"\s*:\s*"([^"\\\s]{1,128})"'
    return re.compile(rf'\{{\s*{kind}{name}\s*,\s*"{key}"\s*:\s*(?=\{{)')


class HermesCalls(CallReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen3 write."""

    def _steps(self) -> Steps:
        while (yield from self._until(("<tool_call>",), self._between)) is not None:
            text = yield from self._call("arguments")
            if text is None:
                # some models leave out the last tag
                yield from self._tag("</tool_call>")
            else:
                self._between(f"<tool_call>{text}")


class BareCalls(CallReader):
    """`{"name": …, "parameters": {…}}`, after `<|python_tag|>` or without, as Llama 3 writes.

    An object with another name is an ordinary answer.
    """

    def _steps(self) -> Steps:
        before = yield from self._begins()
        while before is not None:
            text = yield from self._call("parameters")
            if text is not None:
                self._between(before + text)
                break
            # several are set apart by semicolons
            before = ";" if (yield from self._tag(";")) else ""
            if (yield from self._next()) != "{":
                self._between(before)
                break
        yield from self._until((), self._between)

    def _begins(self) -> Generator[None, None, str | None]:
        """The text before an object that the answer begins with; `None` if it begins otherwise."""
        if (yield from self._next()) == "<" and (yield from self._tag(_PYTHON_TAG)):
            if (yield from self._next()) == "{":
                return _PYTHON_TAG
            self._between(_PYTHON_TAG)
            return None
        return "" if (yield from self._next()) == "{" else None

    def _may_be(self, name: str) -> bool:
        return name in self._functions


class MistralCalls(CallReader):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`."""

    _begin: ClassVar[str] = "[TOOL_CALLS]"
    _list: ClassVar[re.Pattern[str]] = re.compile(r"\s*\[\s*(?=\{)")
    _named: ClassVar[re.Pattern[str]] = re.compile(
        r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)"
    )

    def _steps(self) -> Steps:
        while (yield from self._until((self._begin,), self._between)) is not None:
            is_list = (yield from self._next()) == "["
            begins = yield from self._head(self._list if is_list else self._named)
            if begins is None:
                self._between(self._begin)
            elif is_list:
                yield from self._listed(f"{self._begin}{begins[0]}")
            else:
                self._parts.append(answer_parts.ToolCallStart(begins[1]))
                if (yield from self._arguments()):
                    self._end_call()

    def _listed(self, before: str) -> Steps:
        """The calls of a list, as far as they are calls."""
        while True:
            text = yield from self._call("arguments")
            if text is not None:
                self._between(before + text)
                return
            if not (yield from self._tag(",")):
                yield from self._tag("]")
                return
            before = ","


class TaggedCalls(CallReader):
    """`<function=name>{…}</function>`, as functionary writes."""

    _named: ClassVar[re.Pattern[str]] = re.compile(r"([^<>\s]{1,128})>\s*(?=\{)")

    def _steps(self) -> Steps:
        while (yield from self._until(("<function=",), self._between)) is not None:
            named = yield from self._head(self._named)
            if named is None:
                self._between("<function=")
                continue
            self._parts.append(answer_parts.ToolCallStart(named[1]))
            if (yield from self._arguments()):
                self._end_call()
            yield from self._tag("</function>")


class KeyedCalls(CallReader):
    """Calls whose arguments have a tag each. Strings stream as they are written, other values whole.

    Attributes:
        begins: What a call may begin with.
        name: Its name.
        key: That of the next argument, up to its value, or the end of the call.
        value_ends: The end of a value, and the end of the call, which may come without one.
    """

    begins: ClassVar[Sequence[str]]
    name: ClassVar[re.Pattern[str]]
    key: ClassVar[re.Pattern[str]]
    value_ends: ClassVar[tuple[str, str]]

    def _steps(self) -> Steps:
        while (tag := (yield from self._until(self.begins, self._between))) is not None:
            name = yield from self._named(tag)
            if name is None:
                self._between(tag)
                continue
            self._parts.append(answer_parts.ToolCallStart(name))
            if (yield from self._values(_properties(self._functions.get(name, {})))):
                self._end_call()
                if self.value_ends[1] != "</tool_call>":
                    yield from self._tag("</tool_call>")

    @abstractmethod
    def _named(self, tag: str) -> Generator[None, None, str | None]:
        """The name of a call that begins with a tag; `None` if it is none."""

    def _values(self, properties: Mapping[str, Any]) -> Generator[None, None, bool]:
        """The arguments up to the end of the call; whether they came to it."""
        seen: set[str] = set()
        while True:
            found = yield from self._head(self.key)
            if found is None:
                return False
            if found[1] is None:
                break
            name = found[1]
            start = f"{', ' if seen else '{'}{json.dumps(name, ensure_ascii=False)}: "
            end = yield from self._value(properties.get(name), None if name in seen else start)
            seen.add(name)
            if end is None:
                return False
            if end == self.value_ends[1]:
                break
        self._parts.append(answer_parts.ToolCallDelta("}" if seen else "{}"))
        return True

    def _value(self, schema: Any, start: str | None) -> Generator[None, None, str | None]:
        """One value, and what has ended it. Without a start it is passed, since its key came before."""
        if start is None:
            return (yield from self._until(self.value_ends, _drop))
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            self._parts.append(answer_parts.ToolCallDelta(f'{start}"'))
            breaks: list[str] = []

            def take(text: str) -> None:
                # a line break before the tag is none of the value
                text = "".join([*breaks, text])
                breaks[:] = ["\n"] if text.endswith("\n") else []
                if text := text.removesuffix("\n"):
                    self._parts.append(
                        answer_parts.ToolCallDelta(json.dumps(text, ensure_ascii=False)[1:-1])
                    )

            end = yield from self._until(self.value_ends, take)
            if end is not None:
                self._parts.append(answer_parts.ToolCallDelta('"'))
            return end
        pieces: list[str] = []
        end = yield from self._until(self.value_ends, pieces.append)
        if end is not None:
            value = _typed("".join(pieces).removesuffix("\n"))
            self._parts.append(answer_parts.ToolCallDelta(f"{start}{value}"))
        return end


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _typed(text: str) -> str:
    """The JSON of a value that is not said to be a string: itself, where it is JSON."""
    word = text.strip()
    word = _PYTHON_WORDS.get(word, word)
    return word if word and _is_json(word) else json.dumps(text, ensure_ascii=False)


class XMLCalls(KeyedCalls):
    """`<tool_call><function=name><parameter=key>value</parameter>…`, as Qwen3-Coder writes."""

    begins = ("<tool_call>", "<function=")
    name = re.compile(r"\s*<function=([^<>\s]{1,128})>")
    key = re.compile(r"\s*(?:<parameter=([^<>\n]{1,256})>\n?|</function>)")
    value_ends = ("</parameter>", "</function>")

    def _named(self, tag: str) -> Generator[None, None, str | None]:
        if tag == "<function=":
            # some models leave out the first tag
            self._at -= len(tag)
        found = yield from self._head(self.name)
        if found is None and tag == "<function=":
            self._at += len(tag)
        return None if found is None else found[1]


class GLMCalls(KeyedCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…`, as GLM writes."""

    begins = ("<tool_call>",)
    name = re.compile(r"\s*([\w.-]{1,128})\s*(?=<arg_key>|</tool_call>)")
    key = re.compile(r"\s*(?:<arg_key>([^<>\n]{1,256})</arg_key>\s*<arg_value>|</tool_call>)")
    value_ends = ("</arg_value>", "</tool_call>")

    def _named(self, tag: str) -> Generator[None, None, str | None]:
        found = yield from self._head(self.name)
        return None if found is None else found[1]

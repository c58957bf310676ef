"""Finds tool calls in the text of a model, with one reader for each format."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from ...generation.answers.answer_parts import (
    Part,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    whole_call,
)
from ...generation.scanning import LONGEST_HEAD, Scanner, Steps
from .values import Value, parsed

Functions = Mapping[str, Mapping[str, Any]]
"""The schemas of the arguments of functions by their names."""

_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_KEYS = ("arguments", "parameters", "input")
"""The keys under which models write arguments, whichever their template teaches."""
_HEAD_KEYS = ("name", "type", "id")

Found = Literal["call", "cut", "text"]
"""The kind of a stretch: a call, one that broke off or is malformed, or ordinary text."""
Walk = Generator[None, None, Found]


def _arguments_in(value: Any) -> dict[str, Any] | None:
    """Arguments as models write them: an object, its JSON text, or nothing; else `None`."""
    if isinstance(value, str):
        try:
            value = parsed(value) if value.strip() else None
        except ValueError:
            return None
    if value is None:
        return {}
    return value if isinstance(value, dict) else None


def parsed_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of the call in a JSON object; `None` if the text is no call.

    Args:
        text: What a model wrote.
    """
    try:
        value = parsed(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    key = next((key for key in value if key in _KEYS), None)
    if key is None and not value.keys() <= {*_HEAD_KEYS}:
        # its arguments may stand under a key that is not known
        return None
    given = _arguments_in(None if key is None else value[key])
    if given is None:
        return None
    return value["name"], json.dumps(given, ensure_ascii=False)


class CallReader(Scanner):
    """Finds calls in an answer; all other text is the answer's own.

    A call streams as it is written. What cannot be a call stays text. A call that breaks off has no
    end, and nothing of its markup is text.

    Args:
        functions: Those that may be called.
        strict: Those whose calls follow their schema; one that does not stays text.
        one: Whether nothing follows the first call.
        is_trial: Whether the text is read only as long as it holds nothing but calls of the functions.

    Attributes:
        begins: What a call may begin with.
        is_over: Whether a trial has met something else.
        whole: How many characters there are up to the end of a trial's last call, 0 without one.
        has_begun: Whether a trial ends within a call.
    """

    begins: ClassVar[Sequence[str]]
    holds_strict: ClassVar[bool] = False

    def __init__(
        self,
        functions: Functions,
        *,
        strict: Collection[str] = (),
        one: bool = False,
        is_trial: bool = False,
    ):
        self._functions = functions
        self._strict = strict
        self._one = one
        self._is_trial = is_trial
        self.is_over = self.has_begun = False
        self.whole = 0
        self._has_called = False
        self._blank: list[str] | None = None
        # the parts of a call that is checked once it is whole
        self._unchecked: list[Part] | None = None
        self._raw: list[str] | None = None
        self._raw_from = 0
        super().__init__()

    def add(self, text: str) -> list[Part]:
        if self._raw is not None:
            self._raw.append(self._text[self._raw_from : self._at])
            self._raw_from = 0
        return super().add(text)

    def _steps(self) -> Steps:
        while self._is_trial:
            tag = yield from self._begin_tag()
            if tag is None:
                return
            found = yield from self._tried(tag)
            if found != "call":
                self.is_over, self.has_begun = found == "text", found == "cut"
                return
            self.whole = self.position
        yield from self._answer()

    def _answer(self) -> Steps:
        """Walks over the answer to its end."""
        while (tag := (yield from self._until(self.begins, self._between))) is not None:
            yield from self._tried(tag)

    def _begin_tag(self) -> Generator[None, None, str | None]:
        """The first tag of a call that comes next; `None` if something else or nothing comes."""
        for tag in self.begins:
            if (yield from self._tag(tag)):
                return tag
        self.is_over = bool((yield from self._next()))
        return None

    def _tried(self, tag: str) -> Walk:
        """A call, or several, after a first tag that is passed already."""
        self._keep_raw(tag)
        return (yield from self._settled(tag))

    def _settled(self, tag: str) -> Walk:
        """A call, or several, whose text is kept already."""
        found = yield from self._call(tag)
        if found == "text":
            self._between(self._raw_text())
        self._raw = None
        if found == "cut":
            self._blank = []
            # nothing but its markup is left of an answer that has ended
            self._at = len(self._text) if self._has_ended else self._at
        return found

    @abstractmethod
    def _call(self, tag: str) -> Walk:
        """Reads a call after its first tag."""

    def _keep_raw(self, begin: str = "") -> None:
        """Keeps what is read from here on as it was written."""
        self._raw, self._raw_from = [begin], self._at

    def _raw_text(self) -> str:
        assert self._raw is not None
        return "".join([*self._raw, self._text[self._raw_from : self._at]])

    def _between(self, text: str) -> None:
        """Hands on text of the answer. Space between two calls belongs to neither."""
        if self._blank is not None:
            self._blank.append(text)
            if not text or text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        if text:
            self._put(TextDelta(text))

    def _put(self, part: Part) -> None:
        if self._unchecked is not None:
            self._unchecked.append(part)
        elif not (self._one and self._has_called):
            self._parts.append(part)
            self._has_called |= isinstance(part, ToolCallEnd)

    def _may_be(self, name: str) -> bool:
        """Returns whether a call of a function of this name is one."""
        return not self._is_trial or name in self._functions

    def _begin_call(self, name: str) -> None:
        if self.holds_strict and name in self._strict:
            self._unchecked = []
        elif not self._is_trial:
            # what has begun to stream is no text any more
            self._raw = None
        self._put(ToolCallStart(name))

    def _end_call(self) -> Found:
        """Ends a call, which is text after all if it does not follow its schema."""
        parts, self._unchecked = self._unchecked, None
        if parts is not None:
            start, *deltas = parts
            assert isinstance(start, ToolCallStart)
            arguments = "".join(part.text for part in deltas if isinstance(part, ToolCallDelta))
            if not self._follows(start.name, arguments):
                return "text"
            for part in parts:
                self._put(part)
        self._put(ToolCallEnd())
        self._blank = []
        return "call"

    def _break_off(self, is_cut: bool, skip: Sequence[str]) -> Walk:
        """Gives up a call that breaks off or is malformed. Its markup is passed up to some tags."""
        has_streamed = self._unchecked is None and not self._is_trial
        self._unchecked = None
        if has_streamed:
            yield from self._until(skip, _drop)
        return "cut" if is_cut or has_streamed else "text"

    def _follows(self, name: str, arguments: str) -> bool:
        """Returns whether the arguments of a function follow its schema where they must."""
        if name not in self._strict:
            return True
        return Value(self._functions.get(name, {})).fits(json.loads(arguments))

    def _whole(self, name: str, arguments: str) -> Found:
        """A call that is known as a whole."""
        if not self._may_be(name) or not self._follows(name, arguments):
            return "text"
        for part in whole_call(name, arguments):
            self._put(part)
        self._blank = []
        return "call"

    def _streamed(self) -> Generator[None, None, bool | None]:
        """Streams the JSON object that comes next; whether it was one, `None` if it broke off."""
        chunks: list[str] = []

        def take(text: str) -> None:
            if text:
                chunks.append(text)
                self._put(ToolCallDelta(text))

        is_complete = yield from self._json(take)
        return is_complete and _is_json("".join(chunks))

    def _arguments(self, name: str, skip: Sequence[str]) -> Walk:
        """Arguments that come next, after their name: an object, its JSON text, or `null`."""
        first = yield from self._next()
        if first == "{":
            self._begin_call(name)
            is_object = yield from self._streamed()
            if is_object:
                return self._end_call()
            return (yield from self._break_off(is_object is None, skip))
        chunks: list[str] = []
        is_whole: bool | None
        if first == '"':
            is_whole = yield from self._json(chunks.append)
        else:
            is_whole = yield from self._tag("null")
        if not is_whole:
            is_cut = is_whole is None or self._ends_like("null")
            return "cut" if is_cut else "text"
        given = _arguments_in(None if first != '"' else _value_of("".join(chunks)))
        return "text" if given is None else self._whole(name, json.dumps(given, ensure_ascii=False))

    def _object(self, skip: Sequence[str]) -> Walk:
        """A call that is one JSON object and comes next."""
        yield from self._head(_SPACE)
        head = yield from self._head(_HEAD)
        # what is checked first does not stream
        is_checked = head is not None and self._is_trial and head[1] in self._strict
        if head is not None and self._may_be(head[1]) and not is_checked:
            self._begin_call(head[1])
            is_object = yield from self._streamed()
            if not is_object:
                return (yield from self._break_off(is_object is None, skip))
            if (yield from self._json(_drop, ["}"])) is None:
                return "cut"
            return self._end_call()
        if head is not None:
            self._at = head.start()
        if (yield from self._next()) != "{":
            return "cut" if self._ends_like("{") else "text"
        chunks: list[str] = []
        is_whole = yield from self._json(chunks.append)
        text = "".join(chunks)
        if is_whole is None:
            return "cut" if self._may_become(text) else "text"
        call = parsed_call(text) if is_whole else None
        return "text" if call is None else self._whole(*call)

    def _may_become(self, text: str) -> bool:
        """Returns whether a JSON object that breaks off is the prefix of a call."""
        return True

    def _last_tag(self, tag: str) -> Steps:
        """Passes the last tag of a call, which some models leave out, or what there is of it."""
        if not (yield from self._tag(tag)) and self._ends_like(tag):
            self._at = len(self._text)

    def _ends_like(self, *tags: str) -> bool:
        """Returns whether the answer ends, and with nothing or the prefix of some tag."""
        rest = self._text[self._at :].strip()
        return self._has_ended and any(tag.startswith(rest) for tag in tags)

    def _ends_in(self, pattern: str) -> bool:
        """Returns whether the answer ends, and its rest is all that a pattern describes."""
        return self._has_ended and re.fullmatch(pattern, self._text[self._at :]) is not None


def _drop(text: str) -> None:
    pass


def _value_of(text: str) -> Any:
    try:
        return parsed(text)
    except ValueError:
        return ()


def _is_json(text: str) -> bool:
    return not isinstance(_value_of(text), tuple)


_KIND = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
_HEAD = re.compile(
    rf'\{{\s*{_KIND}"name"\s*:\s*"([^"\\\s]{{1,128}})"\s*,\s*{_KIND}'
    rf'"(?:{"|".join(_KEYS)})"\s*:\s*(?=\{{)'
)
"""The part of a call before its arguments."""


class HermesCalls(CallReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen3 write."""

    begins = ("<tool_call>",)

    def _call(self, tag: str) -> Walk:
        found = yield from self._object(("</tool_call>",))
        if found == "call":
            yield from self._last_tag("</tool_call>")
        return found


class BareCalls(CallReader):
    """`{"name": …, "parameters": {…}}`, after `<|python_tag|>` or without, as Llama 3 writes.

    An object with another name is an ordinary answer.
    """

    begins = (_PYTHON_TAG, "{")

    def _answer(self) -> Steps:
        self._keep_raw()
        tag = yield from self._begin_tag()
        if tag is not None:
            yield from self._settled(tag)
        self._raw = None
        yield from self._until((), self._between)

    def _call(self, tag: str) -> Walk:
        if tag == "{":
            self._at -= 1
        found = yield from self._object(())
        while found == "call":
            # several are set apart by semicolons
            self._keep_raw()
            is_apart = yield from self._tag(";")
            if (yield from self._next()) != "{":
                if not is_apart:
                    return "call"
                return "cut" if self._ends_like("{") else "text"
            found = yield from self._object(())
        return found

    def _may_be(self, name: str) -> bool:
        return name in self._functions

    def _may_become(self, text: str) -> bool:
        written = "".join(text.split())
        heads = [
            f'{{{kind}"name":"{"".join(name.split())}"'
            for name in self._functions
            for kind in ("", '"type":"function",')
        ]
        return any(head.startswith(written) or written.startswith(head) for head in heads)


class MistralCalls(CallReader):
    """`[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}`."""

    begins = ("[TOOL_CALLS]",)
    _list: ClassVar[re.Pattern[str]] = re.compile(r"\s*\[\s*(?=\{)")
    _named: ClassVar[re.Pattern[str]] = re.compile(
        r"\s*([\w.-]{1,128})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\]\s*(?=[{\"n])|\s*(?=\{))"
    )

    def _call(self, tag: str) -> Walk:
        is_list = (yield from self._next()) == "["
        begins = yield from self._head(self._list if is_list else self._named)
        if begins is None:
            is_cut = self._ends_like("[") or self._ends_within_a_name()
            return "cut" if is_cut else "text"
        if not is_list:
            is_one = self._may_be(begins[1])
            return (yield from self._arguments(begins[1], ())) if is_one else "text"
        while True:
            found = yield from self._object(())
            if found != "call":
                return found
            self._keep_raw()
            if not (yield from self._tag(",")):
                yield from self._last_tag("]")
                return "call"

    def _ends_within_a_name(self) -> bool:
        """Returns whether the answer ends within a function's name, or between the name and `{`."""
        name, mark, _ = self._text[self._at :].strip().partition("[")
        if not mark:
            return self._has_ended and any(each.startswith(name) for each in self._functions)
        is_mark = self._ends_in(r"[^[]*\[(?:CALL_ID\].*|[A-Z_]*|ARGS\]\s*)")
        return is_mark and name in self._functions


class TaggedCalls(CallReader):
    """`<function=name>{…}</function>`, as functionary writes."""

    begins = ("<function=",)
    _named: ClassVar[re.Pattern[str]] = re.compile(r"([^<>\s]{1,128})>\s*(?=[{\"n<])")

    def _call(self, tag: str) -> Walk:
        named = yield from self._head(self._named)
        if named is None:
            return "cut" if self._ends_in(r"[^<>\s]*>?\s*") else "text"
        if not self._may_be(named[1]):
            return "text"
        if (yield from self._next()) == "<":
            if (yield from self._tag("</function>")):
                return self._whole(named[1], "{}")
            return "cut" if self._ends_like("</function>") else "text"
        found = yield from self._arguments(named[1], ("</function>",))
        if found == "call":
            yield from self._last_tag("</function>")
        return found


class KeyedCalls(CallReader):
    """Calls whose arguments have a tag each. Strings stream as they are written, other values whole.

    Attributes:
        name: The name of a call, by what the call begins with.
        begun_name: Prefixes of the name, likewise.
        key: The tag of the next argument up to its value, or the end of the call.
        value_end: Ends a value where one of `after_value` follows, or nothing.
        line_break: Whether a line break stands before and after a value.
        call_end: Ends a value and its call where one of `after_call` follows, or nothing.
        end: All that may end a value: both, and the tag of an argument. That does so at the start of a
            line if the function has the argument and it was not given yet.
        begun_end: Prefixes of such a tag, where a text ends with one.
    """

    holds_strict = True
    name: ClassVar[Mapping[str, re.Pattern[str]]]
    begun_name: ClassVar[Mapping[str, str]]
    key: ClassVar[re.Pattern[str]]
    value_end: ClassVar[str]
    line_break: ClassVar[bool]
    after_value: ClassVar[tuple[str, ...]]
    call_end: ClassVar[str]
    after_call: ClassVar[tuple[str, ...]]
    end: ClassVar[re.Pattern[str]]
    begun_end: ClassVar[re.Pattern[str]]

    def _call(self, tag: str) -> Walk:
        named = yield from self._head(self.name[tag])
        if named is None:
            return "cut" if self._ends_in(self.begun_name[tag]) else "text"
        if not self._may_be(named[1]):
            return "text"
        self._begin_call(named[1])
        is_whole = yield from self._values(self._functions.get(named[1], {}))
        found: Found = "text"
        if is_whole:
            found = self._end_call()
        else:
            skip = (self.call_end, "</tool_call>")
            found = yield from self._break_off(self._has_ended, skip)
        if found != "text" and self.call_end != "</tool_call>":
            yield from self._last_tag("</tool_call>")
        return found

    def _values(self, schema: Mapping[str, Any]) -> Generator[None, None, bool]:
        """The arguments up to the end of the call; whether they came to it."""
        properties = _properties(schema)
        seen: set[str] = set()
        while True:
            found = yield from self._head(self.key)
            if found is None:
                return False
            if found[1] is None:
                break
            name = found[1]
            start = f"{', ' if seen else '{'}{json.dumps(name, ensure_ascii=False)}: "
            value = Value(properties.get(name), schema)
            begin = None if name in seen else start
            seen.add(name)
            end = yield from self._value(value, begin, properties.keys() - seen)
            if end is None:
                return False
            if end == self.call_end:
                break
        self._put(ToolCallDelta("}" if seen else "{}"))
        return True

    def _value(
        self, value: Value, start: str | None, left: Collection[str]
    ) -> Generator[None, None, str | None]:
        """One value, and what has ended it. Without a start it is passed, since its key came before."""
        if start is None:
            return (yield from self._to_end(left, _drop))
        if value.is_string:
            self._put(ToolCallDelta(f'{start}"'))
            breaks: list[str] = []

            def take(text: str) -> None:
                # a line break before the tag is none of the value
                text = "".join([*breaks, text])
                breaks[:] = ["\n"] if text.endswith("\n") else []
                if text := text.removesuffix("\n"):
                    self._put(ToolCallDelta(json.dumps(text, ensure_ascii=False)[1:-1]))

            end = yield from self._to_end(left, take)
            if end is not None:
                last = "" if self._has_break(end) else "\\n" * len(breaks)
                self._put(ToolCallDelta(f'{last}"'))
            return end
        chunks: list[str] = []
        end = yield from self._to_end(left, chunks.append)
        if end is not None:
            text = "".join(chunks)
            written = value.written(text.removesuffix("\n") if self._has_break(end) else text)
            self._put(ToolCallDelta(f"{start}{written}"))
        return end

    def _has_break(self, end: str) -> bool:
        """Returns whether a line break before the end of a value is none of it."""
        return self.line_break or end != self.value_end

    def _to_end(
        self, left: Collection[str], take: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Hands on the text of a value and returns what ends it; `None` at the end of the answer.

        The tag of another argument stays, and `""` is returned.

        Args:
            left: The arguments that were not given yet.
            take: Takes the text.
        """
        begins_line = True
        while True:
            found = self.end.search(self._text, self._at)
            begun = (
                None if found or self._has_ended else self.begun_end.search(self._text, self._at)
            )
            mark = found or begun
            before = self._taken((len(self._text) if mark is None else mark.start()) - self._at)
            if before:
                take(before)
                begins_line = before.endswith("\n")
            is_end = None if found is None else self._is_end(found, begins_line, left)
            if found is None and self._has_ended:
                return None
            if found is None or is_end is None:
                yield
            elif not is_end:
                take(self._taken(len(found[0])))
                begins_line = False
            elif found[1] is None:
                self._at = found.end()
                return found[0]
            else:
                return ""

    def _is_end(
        self, found: re.Match[str], begins_line: bool, left: Collection[str]
    ) -> bool | None:
        """Returns whether a tag ends a value; `None` while that is not known."""
        if found[1] is not None:
            return begins_line and found[1] in left
        after = self.after_value if found[0] == self.value_end else self.after_call
        rest = self._text[found.end() : found.end() + LONGEST_HEAD]
        next_tag = rest.lstrip()
        if any(next_tag.startswith(tag) for tag in after):
            return True
        if self._has_ended or len(rest) == LONGEST_HEAD:
            return self._has_ended and not next_tag
        return None if any(tag.startswith(next_tag) for tag in after) else False


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _begun(*tags: str) -> str:
    """A pattern of the prefixes of some tags, of one character at least."""
    prefixes = {tag[:count] for tag in tags for count in range(1, len(tag))}
    return "|".join(map(re.escape, sorted(prefixes, key=len, reverse=True)))


class XMLCalls(KeyedCalls):
    """`<tool_call><function=name><parameter=key>value</parameter>…`, as Qwen3-Coder writes."""

    # some models leave out the first tag
    begins = ("<tool_call>", "<function=")
    name: ClassVar[Mapping[str, re.Pattern[str]]] = {
        "<tool_call>": re.compile(r"\s*<function=([^<>\s]{1,128})>"),
        "<function=": re.compile(r"([^<>\s]{1,128})>"),
    }
    begun_name: ClassVar[Mapping[str, str]] = {
        "<tool_call>": rf"\s*(?:{_begun('<function=')}|<function=[^<>\s]*)?",
        "<function=": r"[^<>\s]*",
    }
    key = re.compile(r"\s*(?:<parameter=([^<>\n]{1,256})>\n?|</function>|</tool_call>)")
    line_break = True
    value_end, after_value = "</parameter>", ("<parameter=", "</function>", "</tool_call>")
    call_end, after_call = "</function>", ("</tool_call>", "<tool_call>", "<function=")
    end = re.compile(r"</parameter>|</function>|<parameter=([^<>\n]{1,256})>")
    begun_end = re.compile(
        rf"(?:{_begun('</parameter>', '</function>', '<parameter=')}|<parameter=[^<>\n]{{0,256}})\Z"
    )


class GLMCalls(KeyedCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…`, as GLM writes."""

    begins = ("<tool_call>",)
    name: ClassVar[Mapping[str, re.Pattern[str]]] = {
        "<tool_call>": re.compile(r"\s*([\w.-]{1,128})\s*(?=<arg_key>|</tool_call>)")
    }
    begun_name: ClassVar[Mapping[str, str]] = {
        "<tool_call>": rf"\s*[\w.-]*\s*(?:{_begun('<arg_key>', '</tool_call>')})?",
    }
    key = re.compile(r"\s*(?:<arg_key>([^<>\n]{1,256})</arg_key>\s*<arg_value>|</tool_call>)")
    line_break = False
    value_end, after_value = "</arg_value>", ("<arg_key>", "</tool_call>")
    call_end, after_call = "</tool_call>", ("<tool_call>",)
    end = re.compile(r"</arg_value>|</tool_call>|<arg_key>([^<>\n]{1,256})</arg_key>")
    begun_end = re.compile(
        rf"(?:{_begun('</arg_value>', '</tool_call>', '<arg_key>')}"
        rf"|<arg_key>[^<>\n]{{0,256}}(?:{_begun('</arg_key>')})?)\Z"
    )

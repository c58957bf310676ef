"""Writes the grammars that hold an answer to a JSON schema, to calls of tools, or to either."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

from ...generation.answers.reasoning import ReasoningTags
from .call_formats import CallFormat
from .readers import BareCalls, Functions
from .values import Value

Special = Mapping[str, int]
"""Tokens that no text spells, by their texts."""


@dataclass(frozen=True)
class Source:
    """The source of a grammar.

    Attributes:
        kind, text: As `grammar_server` takes it.
        param: The parameter that asked for it.
    """

    kind: str
    text: str
    param: str

    @property
    def key(self) -> str:
        """Tells it from others."""
        return hashlib.sha256(f"{self.param} {self.kind} {self.text}".encode()).hexdigest()


Schema = dict[str, Any] | bool


def json_source(
    schema: Schema, special: Special = MappingProxyType({}), reasoning_text: str | None = None
) -> Source:
    """A grammar of JSON that follows a schema.

    Args:
        schema: The schema.
        special: As above.
        reasoning_text: What ends the reasoning that comes before; `None`: none does.
    """
    if reasoning_text is None:
        return Source("json", json.dumps(schema), "response_format")
    rules = _Rules(special)
    rules.add("answer", f"%json {json.dumps(schema)}")
    return Source(
        "lark", rules.text(f"{rules.reasoning_text(reasoning_text)} answer"), "response_format"
    )


def call_source(
    format: CallFormat, functions: Functions, special: Special, reasoning_text: str | None
) -> Source:
    """A grammar of a call of one of some functions.

    Args:
        format: How the model writes calls.
        functions: The schemas of their arguments by name.
        special, reasoning_text: As for `json_source`.
    """
    rules = _Rules(special)
    calls = _Calls(rules, format, functions, functions).whole(many=False)
    before = "" if reasoning_text is None else f"{rules.reasoning_text(reasoning_text)} "
    return Source("lark", rules.text(f"{before}{calls}"), "tools")


def call_or_json_source(
    format: CallFormat,
    functions: Functions,
    strict: Functions,
    schema: Schema,
    special: Special,
    reasoning_text: str | None,
    many: bool,
) -> Source:
    """A grammar of calls, or of JSON that follows a schema.

    Args:
        format, functions, special, reasoning_text: As for `call_source`.
        strict: The functions whose calls follow their schema.
        schema: The schema of an answer that is no call.
        many: Whether there may be several calls.
    """
    rules = _Rules(special)
    if format.reader is BareCalls:
        # both begin alike, so that one schema must tell them apart
        either = _with_calls(schema, functions, strict)
        rules.add("answer", f"%json {json.dumps(either)}")
        start = "answer"
    else:
        rules.add("answer", f"%json {json.dumps(schema)}")
        start = f"({_Calls(rules, format, functions, strict).whole(many)} | answer)"
    before = "" if reasoning_text is None else f"{rules.reasoning_text(reasoning_text)} "
    return Source("lark", rules.text(f"{before}{start}"), "response_format")


def strict_source(
    format: CallFormat,
    functions: Functions,
    strict: Functions,
    special: Special,
    reasoning_tags: ReasoningTags | None,
    is_thinking: bool,
) -> Source:
    """A grammar of any text in which each call of some functions follows its schema.

    Args:
        format, functions, strict, special: As for `call_or_json_source`.
        reasoning_tags: The tags of reasoning, which may hold anything; `None`: there are none.
        is_thinking: Whether the prompt has opened it.
    """
    rules = _Rules(special)
    calls = _Calls(rules, format, functions, strict)
    if reasoning_tags is None:
        return Source("lark", rules.text(calls.within_text()), "tools")
    is_open = rules.without("unclosed", [reasoning_tags.end])
    if is_thinking:
        start = f"{rules.until(reasoning_tags.end)} {calls.within_text()} | {is_open}"
        return Source("lark", rules.text(start), "tools")
    is_special = reasoning_tags.begin in special
    begin = r"\s{0,9}" if is_special else rf"\s{{0,9}}{_escaped(reasoning_tags.begin)}"
    tag = f" {rules.spelled(reasoning_tags.begin)}" if is_special else ""
    body = calls.within_text(but=None if is_special else reasoning_tags.begin)
    start = f"{body} | /{begin}/{tag} ({rules.until(reasoning_tags.end)} {body} | {is_open})"
    return Source("lark", rules.text(start), "tools")


_ANY = "(?s:.*)"
_GAP = r"[ \n]{0,9}"
# as templates write objects, with one space more: what is not the only way to go on is not cut into
# tokens before the model has chosen one, and no space without end comes between
_SPACE = "[ \\n]{0,2}"
_SEPARATORS = {
    "whitespace_flexible": False,
    "item_separator": f",{_SPACE}",
    "key_separator": f":{_SPACE}",
}


def _escaped(text: str) -> str:
    """A text as a regular expression, where space may be left out or be another."""
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text)
    return re.sub(r"\s", lambda _: _SPACE, escaped)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SEPARATORS})}"


class _Rules:
    """The rules of a grammar as Lark has them.

    Args:
        special: Tokens that no text spells.
    """

    def __init__(self, special: Special):
        self._special = special
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Adds a rule and returns its name."""
        self._rules[name] = body
        return name

    def new(self, kind: str, body: str, attributes: str = "") -> str:
        """Adds a rule of some kind, unless there is one, and returns its name."""
        for number in count():
            name = f"{kind}_{number}"
            if self._rules.setdefault(f"{name}{attributes}", body) == body:
                return name
        raise AssertionError

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *(f"{n}: {body}" for n, body in self._rules.items())])

    def reasoning_text(self, end: str) -> str:
        """Reasoning up to its end, and space after it."""
        return f"{self.until(end)} /\\n{{0,2}}/"

    def is_special(self, text: str) -> bool:
        """Returns whether a text is a special token."""
        return text in self._special

    def parts(self, text: str) -> list[str]:
        """A text cut at special tokens."""
        longest_first = sorted(self._special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        return [part for part in re.split(f"({pattern})", text) if part]

    def spelled(self, text: str) -> str:
        """A text, with its special tokens as such."""
        special = self._special
        parts = self.parts(text)
        return " ".join(f"<[{special[p]}]>" if p in special else f"/{_escaped(p)}/" for p in parts)

    def until(self, *tags: str, but: str | None = None) -> str:
        """Any text up to some tags, which may have space between them.

        Args:
            tags: The tags.
            but: What the text must not begin with.
        """
        plain = 0
        while plain < len(tags) and not self.is_special(tags[plain]):
            plain += 1
        excluded = "" if but is None else rf" & ~/\s*{_escaped(but)}{_ANY}/"
        pattern = _ANY + _GAP.join(map(_escaped, tags[:plain]))
        text = self.new("UNTIL", f"/{pattern}/{excluded}")
        if plain:
            text = self.new("until", text, "[lazy]")
        rest = f" /{_GAP}/ ".join(map(self.spelled, tags[plain:]))
        return " ".join(part for part in (text, plain and rest and f"/{_GAP}/", rest) if part)

    def without(self, name: str, tags: Sequence[str], but: str | None = None) -> str:
        """Any text that holds none of some tags."""
        bodies = [f"/{_ANY}/"]
        bodies += [f"~/{_ANY}{_escaped(tag)}{_ANY}/" for tag in tags if tag not in self._special]
        bodies += [] if but is None else [rf"~/\s*{_escaped(but)}{_ANY}/"]
        self.add(name.upper(), " & ".join(bodies))
        return self.add(name, name.upper())


class _Calls:
    """The rules of calls.

    Args:
        rules: Gets them.
        format: How the model writes calls.
        functions: The schemas of their arguments by name.
        strict: The functions whose calls follow their schema.
    """

    def __init__(self, rules: _Rules, format: CallFormat, functions: Functions, strict: Functions):
        self._rules = rules
        self._format = format
        self._functions = functions
        self._strict = strict

    def whole(self, many: bool) -> str:
        """A call by itself, or several."""
        format, rules = self._format, self._rules
        calls = self._either("call", format.begin)
        between = rules.spelled(format.between or " ")
        more = f" ({between} {calls})*" if many else ""
        around = (rules.spelled(format.open), f"{calls}{more}", rules.spelled(format.close))
        return " ".join(part for part in around if part)

    def within_text(self, but: str | None = None) -> str:
        """Calls within any text, which does not begin like something else."""
        format, rules = self._format, self._rules
        if format.reader is BareCalls:
            return self._bare(but)
        before, _, after = format.begin.partition("NAME")
        head = format.open + before
        calls = self._either("rest", f"NAME{after}")
        if format.open:
            calls = f"{calls} ({rules.spelled(format.between + before)} {calls})* "
            calls += rules.spelled(format.close)
        tags = [tag for tag in format.reader.begins if tag in head]
        leads = [
            f"{rules.until(tag, but=but)} {rules.spelled(head.partition(tag)[2])}" for tag in tags
        ]
        text = rules.without("text", tags, but)
        name = "calls" if but is None else "first_calls"
        rules.add(name, f"(({' | '.join(leads)}) {calls})*")
        return f"{name} {text}"

    def _bare(self, but: str | None) -> str:
        """Calls that an answer consists of, or another answer."""
        rules = self._rules
        python_tag, start = self._format.reader.begins
        # one token of the grammar up to the arguments, as long as the other answer may go on
        calls = self._either("call", f"\n\n{self._format.begin}")
        names = "|".join(_escaped(name) for name in self._functions)
        head = rf'\s*({_escaped(python_tag)})?\s*\{start}\s*"name"\s*:\s*"({names})"'
        excluded = [head] + ([] if but is None else [rf"\s*{_escaped(but)}"])
        other = "".join(f" & ~/{each}{_ANY}/" for each in excluded)
        rules.add("OTHER", f"/{_ANY}/{other}")
        several = f"{calls} ({rules.spelled(self._format.between)} {calls})* /\\s{{0,9}}/"
        tag = f"({rules.spelled(python_tag)})? " if rules.is_special(python_tag) else ""
        return rules.add("answer", f"{tag}{several} | OTHER")

    def _either(self, name: str, begin: str) -> str:
        """A call of one of the functions, from its first tag on."""
        found = []
        for number, (function, given) in enumerate(self._functions.items()):
            schema = given if function in self._strict else None
            head = self._rules.spelled(begin.replace("NAME", function))
            rest = self._json_arguments(number, schema)
            if self._format.argument is not None:
                arguments = _TaggedArguments(self._rules, self._format, number, schema)
                # within a text, what may follow a call is free
                rest = arguments.text(with_last=name == "call")
            found.append(self._rules.add(f"{name}_{number}", f"{head} {rest}"))
        return self._rules.add(name, " | ".join(found))

    def _json_arguments(self, number: int, schema: Mapping[str, Any] | None) -> str:
        if self._format.argument is not None:
            return ""
        # each schema by itself, since its references begin at its own root
        rule = _json_rule({"type": "object"} | dict(schema or {}))
        arguments = self._rules.add(f"arguments_{number}", rule)
        return f"{arguments} {self._rules.spelled(self._format.end)}"


class _TaggedArguments:
    """The arguments of a call that have a tag each, in the order of its schema, and its end.

    Args:
        rules: Gets the rules.
        format: How the model writes calls.
        number: The number of the function.
        schema: The schema; `None` lets any arguments through.
    """

    def __init__(
        self, rules: _Rules, format: CallFormat, number: int, schema: Mapping[str, Any] | None
    ):
        assert format.argument is not None
        self._rules = rules
        self._number = number
        self._schema = schema
        self._begin, _, self._begun = format.argument[0].partition("KEY")
        self._end = format.argument[1].strip()
        self._call_end = format.end.partition("\n")[0]
        self._last = rules.spelled(format.end.removeprefix(self._call_end))

    def text(self, with_last: bool) -> str:
        """The rules, from the first argument to the end of the call or to its last tag."""
        return f"{self._arguments()} {self._last if with_last else ''}"

    def _arguments(self) -> str:
        if self._schema is None:
            key = f"/[^<>\\n]{{1,256}}/ {self._rules.spelled(self._begun)}"
            name = f"more_{self._number}"
            more, end = self._ends(None)
            self._rules.add(name, f"{key} ({more} {name} | {end})")
            return self._opened(name, may_end=True)
        properties = self._schema.get("properties")
        values = list(properties.items()) if isinstance(properties, Mapping) else []
        required = self._schema.get("required", ())
        is_last = [
            all(key not in required for key, _ in values[index:])
            for index in range(len(values) + 1)
        ]
        for index in reversed(range(len(values))):
            key, value = values[index]
            more, end = self._ends(value)
            ways = [f"{more} more_{self._number}_{index + 1}"] if index + 1 < len(values) else []
            ways += [end] if is_last[index + 1] else []
            options = [f"{self._rules.spelled(key + self._begun)} ({' | '.join(ways)})"]
            if key not in required and index + 1 < len(values):
                options.append(f"more_{self._number}_{index + 1}")
            self._rules.add(f"more_{self._number}_{index}", " | ".join(options))
        return self._opened(f"more_{self._number}_0" if values else "", is_last[0])

    def _opened(self, more: str, may_end: bool) -> str:
        ways = [f"{self._rules.spelled(self._begin)} {more}"] if more else []
        ways += [self._rules.spelled(self._call_end)] if may_end else []
        return f"({' | '.join(ways)})"

    def _ends(self, value: Any) -> tuple[str, str]:
        """A value up to the next argument, and up to the end of the call."""
        tags = self._begin, self._call_end
        kind = Value(value, self._schema)
        choices = value.get("enum") if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and isinstance(value.get("const"), str):
            choices = [value["const"]]
        if kind.is_string and isinstance(choices, list) and choices:
            body = "(" + " | ".join(self._rules.spelled(f"{choice}") for choice in choices) + ")"
        elif kind.may_be_string:
            return self._rules.until(self._end, tags[0]), self._rules.until(self._end, tags[1])
        else:
            shared = self._schema or {}
            shared = {key: shared[key] for key in ("$defs", "definitions") if key in shared}
            rule = _json_rule(shared | (dict(value) if isinstance(value, Mapping) else {}))
            body = self._rules.new("value", rule)
        gap = f"/{_GAP}/"
        ended = f"{body} {gap} {self._rules.spelled(self._end)} {gap}"
        more, end = (f"{ended} {self._rules.spelled(tag)}" for tag in tags)
        return more, end


def _with_calls(schema: Schema, functions: Functions, strict: Functions) -> dict[str, Any]:
    """A schema of an answer that follows another one, or is a call."""
    named: dict[str, Any] = {"answer": _moved(schema, "answer")}
    for number, (name, given) in enumerate(functions.items()):
        arguments = _moved(dict(given), f"call_{number}") if name in strict else {}
        named[f"call_{number}"] = {"type": "object"} | arguments
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/call_{n}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for n, name in enumerate(functions)
    ]
    return {"anyOf": [{"$ref": "#/$defs/answer"}, *calls], "$defs": named}


def _moved(schema: Any, name: str) -> Any:
    """A schema whose references begin where it stands as a definition of another one."""
    if isinstance(schema, list):
        return [_moved(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(part, name) for key, part in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference.removeprefix('#')}"
    return moved

"""How models write calls of tools: which form a chat template teaches, how it is read and asked for."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import readers


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call.

    Attributes:
        reader: Makes what finds calls of some functions in an answer.
        begin, end: What stands before and after the arguments, with `NAME` for the name, which
            needs no escapes.
        argument: What stands before and after each argument, with `KEY` for its name; `None` where they
            are one JSON object.
    """

    reader: type[readers.CallReader]
    begin: str
    end: str
    argument: tuple[str, str] | None = None

    def written(self, name: str, arguments: str) -> str:
        """A call as the model writes it, with arguments as they are, whole or not."""
        return f"{self.begin.replace('NAME', name)}{arguments}{self.end}"

    def rules(self, functions: readers.Functions, literal: Callable[[str], str]) -> str:
        """The rules, as Lark has them, that let a text be nothing but a call of some function.

        Their first one is `calls`.

        Args:
            functions: The functions.
            literal: Writes a text as Lark has it.
        """
        names, rules = [], []
        for number, (name, schema) in enumerate(functions.items()):
            parts = [literal(self.begin.replace("NAME", name))]
            if self.argument is None:
                # each schema by itself, since its references begin at its own root
                rules.append(f"arguments_{number}: {_json_rule({'type': 'object'} | dict(schema))}")
                parts.append(f"arguments_{number}")
            else:
                parts += _argument_rules(self.argument, schema, number, literal, rules)
            parts += [literal(self.end)] if self.end else []
            names.append(f"call_{number}")
            rules.append(f"call_{number}: {' '.join(parts)}")
        return "\n".join([f"calls: {' | '.join(names)}", *rules])


# as templates write objects, so that no space without end comes between
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SEPARATORS})}"


def _argument_rules(
    around: tuple[str, str],
    schema: Mapping[str, Any],
    number: int,
    literal: Callable[[str], str],
    rules: list[str],
) -> list[str]:
    """The arguments of a function in the order of its schema; rules for their values are added."""
    properties, required = schema.get("properties"), schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for place, (key, value) in enumerate(properties.items() if properties else ()):
        rule = f"value_{number}_{place}"
        value = value if isinstance(value, dict) else {}
        start, end = literal(around[0].replace("KEY", key)), around[1]
        if value.get("type") != "string":
            rules.append(f"{rule}_json: {_json_rule(shared | value)}")
            rules.append(f"{rule}: {rule}_json {literal(end)}")
        elif "enum" in value:
            choices = " | ".join(json.dumps(str(choice)) for choice in value["enum"])
            rules.append(f"{rule}: ({choices}) {literal(end)}")
        else:
            rules.append(f"{rule}[suffix={json.dumps(end)}]: /(?s:.*)/")
        found.append(f"{start} {rule}" if key in required else f"({start} {rule})?")
    return found


_TAG = "<tool_call>", "</tool_call>"
_HERMES = CallForm(
    readers.HermesCalls,
    f'{_TAG[0]}\n{{"name": "NAME", "arguments": ',
    f"}}\n{_TAG[1]}",
)
USUAL_FORM = _HERMES
"""The form of calls in a conversation with a model that was taught none."""
_BARE = CallForm(readers.BareCalls, '{"name": "NAME", "parameters": ', "}")
_MISTRAL_LIST = CallForm(readers.MistralCalls, '[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]")
_MISTRAL = CallForm(readers.MistralCalls, "[TOOL_CALLS]NAME[ARGS]", "")
_TAGGED = CallForm(readers.TaggedCalls, "<function=NAME>", "</function>")
_XML = CallForm(
    readers.XMLCalls,
    f"{_TAG[0]}\n<function=NAME>\n",
    f"</function>\n{_TAG[1]}",
    ("<parameter=KEY>\n", "\n</parameter>\n"),
)
_GLM = CallForm(
    readers.GLMCalls,
    f"{_TAG[0]}NAME\n",
    _TAG[1],
    ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
)


def call_form(template: str) -> CallForm | None:
    """The form of calls that a chat template teaches; `None` if none that is known here.

    Args:
        template: The source of the chat template.
    """
    if "tools" not in template:
        return None
    if "<arg_key>" in template:
        return _GLM
    if "<function=" in template:
        return _XML if "<parameter=" in template else _TAGGED
    if "[TOOL_CALLS]" in template:
        return _MISTRAL if "[ARGS]" in template else _MISTRAL_LIST
    if not _spells(template, "name"):
        return None
    if _TAG[0] in template:
        return _HERMES if _spells(template, "arguments") else None
    return _BARE if _spells(template, "parameters") else None


def _spells(template: str, key: str) -> bool:
    """Whether a template spells a key of JSON, whose quotes may be escaped in a string."""
    return re.search(rf"""["']{key}\\?["']""", template) is not None

"""How models write calls of tools: which form a chat template teaches, how it is read and asked for."""

import re
from dataclasses import dataclass

from . import readers


@dataclass(frozen=True)
class CallFormat:
    """How a model writes a call.

    Attributes:
        reader: What finds calls of some functions in an answer.
        begin, end: What stands before and after the arguments, with `NAME` for the name, which
            needs no escapes.
        argument: What stands before and after each argument, with `KEY` for its name; `None` where they
            are one JSON object.
        open, between, close: What stands before, between and after several calls.
    """

    reader: type[readers.CallReader]
    begin: str
    end: str
    argument: tuple[str, str] | None = None
    open: str = ""
    between: str = ""
    close: str = ""

    def written(self, name: str, arguments: str) -> str:
        """A call as the model writes it, with arguments as they are, whole or not."""
        begin = self.begin.replace("NAME", name)
        return f"{self.open}{begin}{arguments}{self.end}{self.close}"


_TAG = "<tool_call>", "</tool_call>"
_HERMES = CallFormat(
    readers.HermesCalls,
    f'{_TAG[0]}\n{{"name": "NAME", "arguments": ',
    f"}}\n{_TAG[1]}",
)
USUAL_FORMAT = _HERMES
"""The format of calls in a conversation with a model that was taught none."""
_BARE = CallFormat(readers.BareCalls, '{"name": "NAME", "parameters": ', "}", between="; ")
_MISTRAL_LIST = CallFormat(
    readers.MistralCalls,
    '{"name": "NAME", "arguments": ',
    "}",
    open="[TOOL_CALLS] [",
    between=", ",
    close="]",
)
_MISTRAL = CallFormat(readers.MistralCalls, "[TOOL_CALLS]NAME[ARGS]", "")
_TAGGED = CallFormat(readers.TaggedCalls, "<function=NAME>", "</function>")
_XML = CallFormat(
    readers.XMLCalls,
    f"{_TAG[0]}\n<function=NAME>\n",
    f"</function>\n{_TAG[1]}",
    ("<parameter=KEY>\n", "\n</parameter>\n"),
)
_GLM = CallFormat(
    readers.GLMCalls,
    f"{_TAG[0]}NAME\n",
    _TAG[1],
    ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
)


def call_format(template: str) -> CallFormat | None:
    """The format of calls that a chat template teaches; `None` if none that is known here.

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
    """Returns whether a template spells a key of JSON, whose quotes may be escaped in a string."""
    return re.search(rf"""["']{key}\\?["']""", template) is not None

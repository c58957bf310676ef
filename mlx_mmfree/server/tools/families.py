"""Which form of calls a model was taught, by what its chat template says."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from .bare import BareCalls
from .calls import CallReader
from .tagged import BEGIN, END, TaggedCalls


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
    reader: Callable[[Collection[str]], CallReader]


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

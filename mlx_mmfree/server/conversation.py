"""Conversations of every interface as chat templates take them."""

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

from ..errors import MMFreeError
from .schemas import Arguments, Message, in_lines
from .tool_calls.call_formats import USUAL_FORMAT, CallFormat, call_format


@dataclass(frozen=True)
class Call:
    """A call that an earlier answer asked for."""

    id: str
    name: str
    arguments: Arguments


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Turn:
    """The message of one side.

    Attributes:
        number: The number of the message in the request.
        role: Whose message it is.
        text: The words.
        reasoning: The reasoning before that.
        calls: The calls after that.
        call, name: The call whose result it is, and its function.
    """

    number: int
    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call: str | None = None
    name: str | None = None


Turns = list[Turn]


def turns_of(messages: Iterable[Message]) -> Turns:
    """The turns of a conversation. A developer speaks as the system, and a result knows its function."""
    names: dict[str, str] = {}
    turns = []
    for number, message in enumerate(messages):
        calls = tuple(
            Call(call.id, call.function.name, call.function.arguments)
            for call in message.tool_calls or ()
        )
        names |= {call.id: call.name for call in calls}
        name = message.name
        if message.role == "tool":
            name = name or names.get(message.tool_call_id or "")
        role: Role = "system" if message.role == "developer" else message.role
        texts = message.text, message.reasoning_text
        turns.append(Turn(number, role, *texts, calls, message.tool_call_id, name))
    return turns


def _merged(turns: Turns, roles: Iterable[Role]) -> Turns:
    """The turns with other roles, in which what one side says in a row is one turn."""
    pairs = zip(roles, turns, strict=True)
    found: Turns = []
    for role, group in groupby(pairs, key=lambda pair: pair[0]):
        same = [turn for _, turn in group]
        if role == "tool" or len(same) == 1:
            found += [replace(turn, role=role) for turn in same]
            continue
        calls = tuple(call for turn in same for call in turn.calls)
        texts = in_lines(turn.text for turn in same), in_lines(turn.reasoning for turn in same)
        found.append(Turn(same[0].number, role, *texts, calls))
    return found


def in_order(turns: Turns, first: Role = "system") -> Turns:
    """Instructions before the first turn as one of the role `first`, and later ones as the user's."""
    begin = next((n for n, turn in enumerate(turns) if turn.role != "system"), len(turns))
    later: list[Role] = ["user" if turn.role == "system" else turn.role for turn in turns[begin:]]
    return _merged(turns, [first] * begin + later)


def one_call_each(turns: Turns) -> Turns:
    """Each call as a turn of its own, before its result."""
    found: Turns = []
    left = list(reversed(turns))
    while left:
        turn = left.pop()
        if len(turn.calls) < 2:
            found.append(turn)
            continue
        results: Turns = []
        while left and left[-1].role == "tool":
            results.append(left.pop())
        answer = replace(turn, calls=())
        for call in turn.calls:
            found.append(replace(answer, calls=(call,)))
            answer = Turn(turn.number, "assistant")
            own = next((n for n, each in enumerate(results) if each.call == call.id), None)
            found += [] if own is None else [results.pop(own)]
        found += results
    return found


TemplateMessage = tuple[int, dict[str, Any]]
"""A message as templates read it, after the number of the one that it came from."""


def alternating(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The messages with empty ones between, so that user and assistant take turns, calls aside."""
    found: list[TemplateMessage] = []
    sides = ["user", "assistant"]
    for number, message in messages:
        if message["role"] in sides and "tool_calls" not in message:
            if message["role"] != sides[0]:
                found.append((number, {"role": sides[0], "content": ""}))
                sides.reverse()
            sides.reverse()
        found.append((number, message))
    if sides == ["user", "assistant"] and not any(m["role"] in sides for _, m in found):
        found.append((0, {"role": "user", "content": ""}))
    return found


@dataclass(frozen=True)
class CallRules:
    """How a chat template takes the calls of earlier answers.

    Attributes:
        format: How the model writes one.
        are_read: Whether the template writes calls at all.
        are_single: Whether it refuses several in one message.
        have_short_ids: Whether it refuses ids that have not nine letters.
    """

    format: CallFormat
    are_read: bool = True
    are_single: bool = False
    have_short_ids: bool = False


_SHORT = 9


@lru_cache(maxsize=64)
def call_rules(tokenizer: Any, has_tools: bool) -> CallRules:
    """The rules of a template, found by trying.

    Args:
        tokenizer: The tokenizer.
        has_tools: Whether it is the template for conversations with tools.
    """
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    names = {"tools": tools} if has_tools else {}

    def takes(*ids: str) -> bool:
        function = {"name": "f", "arguments": {}}
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        results = [{"role": "tool", "name": "f", "tool_call_id": i, "content": "b"} for i in ids]
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *results,
        ]
        try:
            tokenizer.render_chat(messages, **names)
        except MMFreeError:
            return False
        return True

    template = tokenizer.chat_template_source(tools=has_tools)
    format = call_format(template) or USUAL_FORMAT
    short, other = "a" * _SHORT, "b" * _SHORT
    if not takes(short):
        return CallRules(format, "tool_calls" in template)
    are_single, have_short_ids = not takes(short, other), not takes("call_0123456789")
    return CallRules(format, "tool_calls" in template, are_single, have_short_ids)


def arrangements(turns: Turns, rules: CallRules) -> Iterator[list[TemplateMessage]]:
    """The messages of a conversation, as they came and then in the orders that most templates take.

    Args:
        turns: The conversation.
        rules: How its calls are taken.
    """
    tried: list[list[TemplateMessage]] = []
    orders = (turns, in_order(turns), in_order(turns, "user"))
    for order, is_filled in ((0, False), (1, False), (1, True), (2, True)):
        split = one_call_each(orders[order]) if rules.are_single else orders[order]
        messages = [message for turn in split for message in _messages(turn, rules)]
        messages = alternating(messages) if is_filled else messages
        if messages not in tried:
            tried.append(messages)
            yield messages


def _messages(turn: Turn, rules: CallRules) -> Iterator[TemplateMessage]:
    """A turn as templates read it. Calls that they cannot write are text, each where it stood."""
    shown = short_id if rules.have_short_ids else str
    given = {"name": turn.name, "reasoning_content": turn.reasoning or None}
    if turn.call is not None:
        given["tool_call_id"] = shown(turn.call)
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    message |= {name: value for name, value in given.items() if value is not None}

    def is_text(call: Call) -> bool:
        return not rules.are_read or isinstance(call.arguments, str)

    for number, (are_text, calls) in enumerate(groupby(turn.calls, key=is_text)):
        if number:
            yield turn.number, message
            message = {"role": turn.role, "content": ""}
        if are_text:
            texts = (rules.format.written(call.name, _as_text(call.arguments)) for call in calls)
            message["content"] = in_lines([message["content"], *texts])
        else:
            message["tool_calls"] = [
                {
                    "id": shown(call.id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
    yield turn.number, message


def _as_text(arguments: Arguments) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_LETTERS = string.digits + string.ascii_letters


def short_id(name: str) -> str:
    """Nine letters and digits that stand for the id of a call; itself, where it has that form."""
    if re.fullmatch(f"[0-9a-zA-Z]{{{_SHORT}}}", name):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest())
    letters = []
    for _ in range(_SHORT):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return "".join(letters)

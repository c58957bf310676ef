"""Conversations: their messages as plain data, the template that writes them out, and the token ids.

Chat templates are Jinja programs that come with a checkpoint. They run in a process with limits.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError, EffortError, MMFreeError, UsageError
from ..files.reading import parse_json
from ..platform.confinement.policy import TEMPLATE
from ..platform.confinement.process import LimitError
from .vocabulary import Before, Shield, SpecialTokens, encode_split

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The keys under which a message may hold its reasoning, in the order of transformers 5."""

_MAX_DEPTH = 100
MAX_CHARACTERS = 8 * 2**20
"""The most characters that a template is given, and that it may write."""


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """The reasoning of a message under the first of `REASONING_KEYS` that holds any.

    It is empty if those that there are hold none, and `None` without any.
    """
    given = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    return next(filter(None, given), given[0] if given else None)


def chat_data(
    messages: Any, add_generation_prompt: bool, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """A copy of everything that a template may read, by name.

    What is `None` in a message is left out, and its reasoning comes under the keys that templates read,
    as in transformers 5. Tools, and the arguments of calls, may be JSON texts.

    Args:
        messages: The conversation.
        add_generation_prompt: Whether the text is to end where the model's answer begins.
        variables: Further names for the template.

    Raises:
        UsageError: A message has no role, a value is not plain data, tools are not objects, or all
            have more characters than a template may write.
    """
    data = copy_data({**variables, "messages": check_messages(messages)})
    data["messages"] = [_normalized(message) for message in data["messages"]]
    if "tools" in data:
        data["tools"] = _tools(data["tools"])
    if (count := sum(map(len, texts_in(data)))) > MAX_CHARACTERS:
        raise UsageError(
            f"[apply_chat_template] 'messages' must have at most {MAX_CHARACTERS:,} characters, with "
            f"the tools, but have {count:,}. Make the conversation shorter."
        )
    return {**data, "add_generation_prompt": bool(add_generation_prompt)}


def join_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a text for each list of parts, for a template that reads no parts.

    Raises:
        UsageError: A part is not a text.
    """
    return [
        message | {"content": _concatenated(message["content"], number)}
        if isinstance(message.get("content"), list)
        else message
        for number, message in enumerate(messages)
    ]


def copy_data(data: Mapping[str, Any], change: Callable[[str], str] = str) -> dict[str, Any]:
    """A copy of nested plain data in which every text is changed.

    Args:
        data: Values by the names of the arguments that they were given as.
        change: Makes the text of the copy from a text.

    Raises:
        UsageError: A value holds anything but texts, numbers, lists and dictionaries, or is nested too
            deeply.
    """
    return {name: _copy(value, name, change, depth=1) for name, value in data.items()}


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in nested plain data, in any order."""
    # nested generators would pass each text through all that it lies in
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            values += value.keys()
            values += value.values()
        elif isinstance(value, (list, tuple)):
            values += value


def _copy(value: Any, name: str, change: Callable[[str], str], depth: int) -> Any:
    if isinstance(value, str):
        return change(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if depth > _MAX_DEPTH:
        raise UsageError(
            f"[apply_chat_template] '{name}' must be nested at most {_MAX_DEPTH} deep but goes deeper. "
            "Make it flatter."
        )
    if isinstance(value, Mapping):
        return {
            _copy(key, name, change, depth + 1): _copy(item, name, change, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy(item, name, change, depth + 1) for item in value]
    raise UsageError(
        f"[apply_chat_template] '{name}' must hold only texts, numbers, lists and dictionaries but got "
        f"{type(value).__name__}. Convert it first."
    )


def check_messages(messages: Any) -> list[Any]:
    """The messages as a list, if they are objects with a role.

    Raises:
        UsageError: They are not.
    """
    if isinstance(messages, (list, tuple)) and messages:
        if all(map(_has_role, messages)):
            return list(messages)
        messages = next(message for message in messages if not _has_role(message))
    raise UsageError(
        "[apply_chat_template] 'messages' must be a list of at least one object with 'role' and "
        f"'content' but got {messages!r:.60}. Write them as [{{'role': 'user', 'content': '…'}}]."
    )


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") is not None


def _normalized(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = reasoning_of(given)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    if "tool_calls" in given:
        calls = _parsed(given["tool_calls"], "tool_calls")
        given["tool_calls"] = (
            [_with_object(call, "arguments") for call in calls]
            if isinstance(calls, list)
            else calls
        )
    return given


def _tools(tools: Any) -> list[Any] | None:
    """The tools as a list of objects; `None` if there are none."""
    tools = _parsed(tools, "tools")
    listed = tools if isinstance(tools, list) else [tools] if tools else []
    found = [_with_object(_parsed(tool, "tools"), "parameters") for tool in listed]
    for tool in found:
        if not isinstance(tool, Mapping):
            raise UsageError(
                "[apply_chat_template] 'tools' must be a list of objects, or the JSON text of one, but "
                f"holds {tool!r:.80}."
            )
    return found or None


def _with_object(described: Any, name: str) -> Any:
    """A tool or a call in which `name` is an object, which may have come as its JSON text."""
    if not isinstance(described, Mapping):
        return described
    changed = dict(described)
    for key in (name, "function"):
        text = changed.get(key)
        if isinstance(text, str) and text.lstrip().startswith("{"):
            changed[key] = _parsed(text, key)
    if "function" in changed:
        changed["function"] = _with_object(changed["function"], name)
    return changed


def _parsed(value: Any, name: str) -> Any:
    """The value of a JSON text. An empty one has none, and anything else is given back."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode("utf-8", "surrogatepass")) if value.strip() else None
    except ValueError as error:
        raise UsageError(
            f"[apply_chat_template] the text in '{name}' {error}. Write it as an object or as JSON."
        ) from error


def _concatenated(parts: list[Any], number: int) -> str:
    for part in parts:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise UsageError(
                f"[apply_chat_template] 'messages[{number}].content' must be a text or a list of parts "
                f"with a 'text', which is all that this chat template reads, but holds {part!r:.80}."
            )
    return "".join(part["text"] for part in parts)


class ChatVocabulary(Protocol):
    """The part of a vocabulary that this module needs."""

    special: SpecialTokens

    def encode(
        self, text: str, before: Before = "nothing", *, parse_special: bool = False
    ) -> list[int]: ...


class RenderedChat:
    """The text of a conversation, which knows the special tokens of the template from those in messages.

    Args:
        covered: The text of the template, in which a shield covers the special tokens in messages.
        shield: The shield.
        vocabulary: The vocabulary, which makes the ids.
        bos_token_id: The token that every conversation begins with; `None`: as the template has it.

    Attributes:
        text: The conversation as a reader sees it.
    """

    def __init__(
        self, covered: str, shield: Shield, vocabulary: ChatVocabulary, bos_token_id: int | None
    ) -> None:
        self.text = shield.restore(covered)
        self._covered = covered
        self._shield = shield
        self._vocabulary = vocabulary
        self._bos_token_id = bos_token_id

    def ids(self) -> list[int]:
        """The ids of the conversation. A first token that it needs and the template lacks is added."""
        ids = self._ids()
        if self._bos_token_id is None or ids[:1] == [self._bos_token_id]:
            return ids
        return [self._bos_token_id, *ids]

    def ids_after(self, size: int) -> list[int]:
        """The ids of what follows the first `size` characters of the text."""
        parts = list(self._vocabulary.special.split(self._covered[:size]))
        before: Before = "text"
        if not parts or isinstance(parts[-1], int):
            before = "special" if parts else "nothing"
        return self._ids_of_parts(self._covered[size:], before)

    def _ids(self) -> list[int]:
        special = self._vocabulary.special
        parts = list(special.split(self._covered))
        if parts == list(special.split(self.text)):
            ids = self._vocabulary.encode(self.text, parse_special=True)
            spelled = [part for part in parts if isinstance(part, int)]
            if [number for number in ids if number in special.id_set] == spelled:
                return ids
        return self._ids_of_parts(self._covered)

    def _ids_of_parts(self, covered: str, before: Before = "nothing") -> list[int]:
        parts = (
            part if isinstance(part, int) else self._shield.restore(part)
            for part in self._vocabulary.special.split(covered)
        )
        return encode_split(self._vocabulary.encode, parts, before)


EFFORT = "reasoning_effort"
"""The variable of chat templates that says how much a model thinks before it answers."""
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""The values that it has in the interfaces of OpenAI and Anthropic, beside none."""
# an expression of a template that names the variable, and the words in it
_NEAR_EFFORT = re.compile(rf"{EFFORT}[^%}}]{{0,400}}")
_QUOTED = re.compile(r"""['"]([A-Za-z_-]{1,20})['"]""")

_GROWTH, _MORE_CHARACTERS = 8, 1_000_000
"""A template writes at most so many times what it is given, and so many characters more."""
_PROBE = "words of a part"
_LISTED = re.compile(f"""['"]{_PROBE}['"]""")

_renderer = TEMPLATE.process()


class ChatTemplate:
    """One chat template.

    Args:
        source: The Jinja source.
        folder: The folder it was read from, for messages.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source = source
        self._folder = folder
        self._reads_parts: bool | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            variables: `messages`, `add_generation_prompt` and whatever else the template reads.

        Raises:
            UsageError: The template refuses the messages.
            EffortError: It refuses `reasoning_effort`.
            CheckpointError: The template is faulty, takes too long or writes too much.
        """
        names = {"tools": None, "documents": None} | dict(variables)
        try:
            given = [names.get(name) for name in ("messages", "tools", "documents")]
            most = min(MAX_CHARACTERS, _MORE_CHARACTERS + _GROWTH * sum(map(len, texts_in(given))))
            answer = _renderer.ask((self.source, names, most), TEMPLATE.seconds)
        except LimitError as error:
            raise self._fault(str(error)) from error
        if "refused" in answer:
            self._check_effort(names, answer["refused"])
            raise UsageError(
                f"[chat template] the chat template refuses the messages: {answer['refused']}"
            )
        if "text" not in answer:
            raise self._fault(answer["fault"], answer.get("line"))
        return str(answer["text"])

    def _check_effort(self, names: Mapping[str, Any], refusal: str) -> None:
        """Raises an error of its own where the effort of thinking is what the template refuses."""
        effort = names.get(EFFORT)
        rest = {name: value for name, value in names.items() if name != EFFORT}
        if effort is None or not self._takes(rest):
            return
        near = "".join(_NEAR_EFFORT.findall(self.source))
        candidates = dict.fromkeys((*EFFORTS, *_QUOTED.findall(near)))
        taken = [each for each in candidates if self._takes({**rest, EFFORT: each})]
        raise EffortError(
            f"[chat template] '{EFFORT}' must be {' or '.join(taken) or 'left out'} for this chat "
            f"template but got {effort!r:.60}: {refusal}"
        )

    def _takes(self, names: Mapping[str, Any]) -> bool:
        """Returns whether the template writes a text with these variables."""
        try:
            return "text" in _renderer.ask((self.source, names, MAX_CHARACTERS), TEMPLATE.seconds)
        except LimitError:
            return False

    def reads_parts(self, named: Mapping[str, Any]) -> bool:
        """Returns whether the template writes the text of a message that comes as a list of parts.

        Args:
            named: The special tokens by the names under which the template reads them.
        """
        if self._reads_parts is None:
            message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
            names = {**named, "messages": [message], "add_generation_prompt": False}
            try:
                text = self.render(names)
            except MMFreeError:
                text = ""
            # a template that knows texts alone writes the list itself
            self._reads_parts = _PROBE in text and not _LISTED.search(text)
        return self._reads_parts

    def _fault(self, reason: str, line: int | None = None) -> CheckpointError:
        where = "" if line is None else f" in line {line}"
        return CheckpointError(
            f"[chat template] the chat template of '{self._folder}' cannot be used{where} ({reason}). "
            "Correct it, or encode a plain prompt instead."
        )

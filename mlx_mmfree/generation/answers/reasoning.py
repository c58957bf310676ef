"""Reasoning before an answer: how it is separated from the text, and ended after some tokens."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx

from ...tokenizer.chat import REASONING_KEYS, reasoning_of
from ..scanning import Scanner, Steps
from .answer_parts import Part, PartReader, ThinkingDelta, ToolCallEnd
from .stop_strings import StopStrings, overlap


@dataclass(frozen=True)
class ReasoningTags:
    """The tags before and after reasoning."""

    begin: str
    end: str

    def are_open(self, prompt: str) -> bool:
        """Returns whether a prompt ends within reasoning, which the answer goes on with."""
        return prompt.rstrip().endswith(self.begin)


_TAGS = tuple(
    ReasoningTags(*pair)
    for pair in (
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
    )
)


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags of reasoning that a chat template knows; `None` for none that are known here.

    Args:
        template: The source of the chat template.

    Example:
        >>> reasoning_tags("{{ message.content.split('</think>')[-1] }}")
        ThoughtTags(begin='<think>', end='</think>')
    """
    return next((tags for tags in _TAGS if tags.begin in template or tags.end in template), None)


def with_reasoning(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message with its reasoning where a chat template looks for it; left out where it does not look.

    Args:
        message: As clients send it.
        template: The source of the chat template.

    Example:
        >>> message = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
        >>> with_reasoning(message, "{{ message.reasoning_content }}")
        {'role': 'assistant', 'content': 'Yes.', 'reasoning_content': 'Hm.'}
        >>> with_reasoning(message, "{{ message.content.split('</think>') }}")["content"]
        '<think>\\nHm.\\n</think>\\n\\nYes.'
    """
    values = {name: value for name, value in message.items() if name not in REASONING_KEYS}
    reasoning = reasoning_of(message)
    if not reasoning:
        return values
    key = next((key for key in REASONING_KEYS if re.search(rf"\b{key}\b", template)), None)
    tags = reasoning_tags(template)
    if key is not None:
        values[key] = reasoning
    elif tags is not None and tags.end in template:
        content = values.get("content") or ""
        values["content"] = f"{tags.begin}\n{reasoning}\n{tags.end}\n\n{content}"
    return values


class Trial(PartReader, Protocol):
    """Reads a text as long as it holds nothing but calls of tools.

    Attributes:
        is_over: Whether something else has come.
        whole: How many characters there are up to the end of the last call, 0 without one.
        has_begun: Whether the text ends within a call.
    """

    is_over: bool
    whole: int
    has_begun: bool


@dataclass(frozen=True)
class CallTrial:
    """How calls of tools are looked for at the end of reasoning.

    Attributes:
        begins: What a call may begin with.
        make: Makes what reads from there on.
    """

    begins: Sequence[str]
    make: Callable[[], Trial]


# the most characters that may be read twice, since they only began like a call
_MOST_READ_AGAIN = 1_000_000


class ReasoningReader(Scanner):
    """Tells the reasoning that an answer begins with from what follows, in which another reader looks.

    Space around reasoning is none of it. Reasoning that is never closed is all of the answer but the
    calls that it ends with. What looks like a call within reasoning that goes on is part of it.

    Args:
        inner: Reads what follows.
        tags: What stands around the reasoning.
        is_open: Whether the prompt has opened it.
        goes_on: Whether the prompt ends within the reasoning, whose space is then part of it.
        calls: How calls are looked for at its end; `None`: there are none.

    Attributes:
        size: Characters up to the end of the reasoning and its tag, 0 without reasoning; `None` while
            that is not known.
        is_thinking: Whether the reasoning has begun.

    Example:
        >>> from mlx_mmfree.generation.answers.answer_parts import TextReader
        >>> reader = ReasoningReader(TextReader(), ReasoningTags("<think>", "</think>"), is_open=True)
        >>> [*reader.add("Two and t"), *reader.add("wo. </thi"), *reader.add("nk>4")]
        [ThinkingDelta(text='Two and t'), ThinkingDelta(text='wo.'), TextDelta(text='4')]
    """

    def __init__(
        self,
        inner: PartReader,
        tags: ReasoningTags,
        is_open: bool,
        goes_on: bool = False,
        calls: CallTrial | None = None,
    ):
        self._inner = inner
        self._tags = tags
        self._calls = calls
        self._may_read_again = _MOST_READ_AGAIN
        self._space: list[str] | None = [] if goes_on else None
        self.size: int | None = None
        self.is_thinking = is_open
        super().__init__()

    def finalize(self) -> list[Part]:
        return [*super().finalize(), *self._inner.finalize()]

    def _steps(self) -> Steps:
        # some models write the tag though the prompt has
        is_tagged = (yield from self._next()) == self._tags.begin[0] and (
            yield from self._tag(self._tags.begin)
        )
        self.is_thinking |= is_tagged
        if self.is_thinking:
            is_closed = yield from self._reasoning()
            while is_closed and not self._has_ended:
                self._at += len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
                if self._at < len(self._text):
                    break
                yield
        else:
            self.size = 0
        yield from self._until((), self._pass)

    def _reasoning(self) -> Generator[None, None, bool]:
        """Reads the reasoning; whether it was closed."""
        begins = () if self._calls is None else self._calls.begins
        while True:
            if self._may_read_again <= 0:
                begins = ()
            tag = yield from self._until((self._tags.end, *begins), self._think)
            if tag == self._tags.end:
                self.size = self.position
                return True
            if tag is None or (yield from self._ends_with_calls(tag)):
                return False

    def _ends_with_calls(self, tag: str) -> Generator[None, None, bool]:
        """Returns whether the answer ends with calls, the first of which has the tag just read."""
        assert self._calls is not None
        end, trial = self._tags.end, self._calls.make()
        start, chunks = self.position - len(tag), [tag]
        parts = trial.add(tag)
        is_closed = False
        while not trial.is_over and not is_closed:
            at = self._text.find(end, self._at)
            is_closed = at >= 0
            rest = self._text[self._at :]
            withheld = 0 if is_closed or self._has_ended else overlap(rest, end)
            chunks.append(self._taken(at - self._at if is_closed else len(rest) - withheld))
            parts += trial.add(chunks[-1])
            if self._has_ended and not is_closed:
                parts += trial.finalize()
                break
            if not trial.is_over and not is_closed:
                yield
        text = "".join(chunks)
        if not trial.is_over and not is_closed:
            last = max(
                (n for n, part in enumerate(parts) if isinstance(part, ToolCallEnd)), default=-1
            )
            self._parts += parts[: last + 1]
            if last >= 0 or trial.has_begun:
                self.size = start
                return True
        # all of it is the reasoning's, or as much of it as was no further call
        size = len(text) if is_closed else trial.whole or len(tag)
        self._think(text[:size])
        self._may_read_again -= len(text) - size
        self._passed = start + size
        self._text, self._at = text[size:] + self._text[self._at :], 0
        return False

    def _think(self, text: str) -> None:
        # space at the end of reasoning is known once the reasoning goes on
        is_first = self._space is None
        space = self._space or []
        body = text.rstrip()
        if body:
            text_before = "" if is_first else "".join(space)
            shown = f"{text_before}{body.lstrip() if is_first else body}"
            self._parts.append(ThinkingDelta(shown))
            self._space = [text[len(body) :]]
        elif not is_first:
            space.append(text)

    def _pass(self, text: str) -> None:
        self._parts += self._inner.add(text)


class AnswerEnd:
    """Ends an answer at a stop string that stands after its reasoning, or after its first call.

    Args:
        strings: The stop strings.
        reader: Takes the answer apart.
        one_call: Whether the first call of a tool ends the answer.

    Example:
        >>> from mlx_mmfree.generation.answers.answer_parts import TextReader
        >>> reader = ReasoningReader(TextReader(), ReasoningTags("<think>", "</think>"), is_open=True)
        >>> end = AnswerEnd(["END"], reader)
        >>> end.add("The END comes last.</think>"), end.add("\\n\\nTwo END"), end.met
        ('The END comes last.</think>', '\\n\\nTwo ', 'END')
    """

    def __init__(self, strings: Sequence[str], reader: PartReader, one_call: bool = False):
        self._stop = StopStrings(strings)
        self._reader = reader
        self._one_call = one_call
        self._has_called = False
        self._pending = ""
        self._passed = 0
        self._has_begun = not isinstance(reader, ReasoningReader)

    @property
    def met(self) -> str | None:
        """The stop string that has ended the answer, if one has."""
        return self._stop.met

    @property
    def is_met(self) -> bool:
        """True if the answer has ended."""
        return self._stop.is_met or self._has_called

    @property
    def holds_back(self) -> bool:
        """True if there is text that more text decides on."""
        return bool(self._pending) or self._stop.holds_back

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""
        parts = self._reader.add(text)
        self._has_called |= self._one_call and any(isinstance(p, ToolCallEnd) for p in parts)
        if self._has_begun:
            return self._stop.add(text)
        text, self._pending = self._pending + text, ""
        reader = cast(ReasoningReader, self._reader)
        if reader.size is None and not reader.is_thinking:
            self._pending = text
            return ""
        # space around reasoning is no part of the answer
        rest = "" if reader.size is None else text[max(reader.size - self._passed, 0) :]
        rest = rest.lstrip() if reader.size else rest
        self._passed += len(text)
        self._has_begun = bool(rest)
        return text[: len(text) - len(rest)] + self._stop.add(rest)

    def finalize(self) -> str:
        """The text held back, once no more follows."""
        pending, self._pending = self._pending, ""
        return pending + self._stop.finalize()


_NONE = -1


class ReasoningBudget:
    """Ends reasoning after some tokens by its closing tag. It is a `LogitsProcessor` of one text.

    Args:
        tokenizer: Belongs to the model.
        tags: What stands around the reasoning.
        is_open: Whether the prompt has opened it.
        most: How many tokens it may have.

    Raises:
        ValueError: The number is negative.
    """

    def __init__(self, tokenizer: Any, tags: ReasoningTags, is_open: bool, most: int):
        if most < 0:
            raise ValueError(f"[generate] 'reasoning_budget' must be at least 0 but got {most}.")
        self._tokenizer = tokenizer
        self._tags = tags
        self._opens = is_open
        self._most = most
        closing = f"\n{tags.end}\n\n"
        self._closing: list[int] = tokenizer.encode_continuation(closing, parse_special=True)

    def copy(self) -> "ReasoningBudget":
        """The same for another text."""
        return ReasoningBudget(self._tokenizer, self._tags, self._opens, self._most)

    def start(self, tokens: mx.array, valid: mx.array | None, vocab_size: int) -> mx.array:
        self._detokenizer = self._tokenizer.detokenizer()
        self._tail = ""
        self._is_open, self._may_open = self._opens, not self._opens
        self._count = 0
        self._left: list[int] | None = None
        return mx.full((tokens.shape[0],), _NONE, dtype=mx.int32)

    def __call__(self, logits: mx.array, state: mx.array) -> mx.array:
        if self._left is None and (self._is_open or self._may_open):
            chosen = cast(int, state.item())
            if chosen != _NONE:
                self._look_at(chosen)
            if self._is_open and self._count >= self._most:
                self._left = list(self._closing)
        if not self._left:
            return logits
        return mx.where(mx.arange(logits.shape[-1]) == self._left.pop(0), logits, -mx.inf)

    def update(self, state: mx.array, tokens: mx.array) -> mx.array:
        return tokens.astype(mx.int32)

    def _look_at(self, token: int) -> None:
        """Takes a token in that was chosen."""
        self._tail += self._detokenizer.add(token)
        begin, end = self._tags.begin, self._tags.end
        if self._may_open:
            begun = self._tail.lstrip()
            self._is_open = begun.startswith(begin)
            self._may_open = not self._is_open and begin.startswith(begun)
            return
        self._count += 1
        self._is_open = end not in self._tail
        self._tail = self._tail[-len(end) :]

"""Thoughts before an answer: how they are told from the text, and ended after some tokens."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from .answer_parts import Part, PartReader, ThinkingDelta
from .scanning import Scanner, Steps

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which messages hold the thoughts of an earlier answer."""


@dataclass(frozen=True)
class ThoughtTags:
    """The marks before and after a thought."""

    begin: str
    end: str

    def are_open(self, prompt: str) -> bool:
        """Whether a prompt ends within a thought, which the answer goes on with."""
        return prompt.rstrip().endswith(self.begin)


_TAGS = tuple(
    ThoughtTags(*pair)
    for pair in (
        ("<think>", "</think>"),
        ("<thinking>", "</thinking>"),
        ("<thought>", "</thought>"),
        ("<reasoning>", "</reasoning>"),
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
    )
)


def thought_tags(template: str) -> ThoughtTags | None:
    """The tags of thoughts that a chat template knows; `None` for none that are known here.

    Args:
        template: The source of the chat template.

    Example:
        >>> thought_tags("{{ message.content.split('</think>')[-1] }}")
        ThoughtTags(begin='<think>', end='</think>')
    """
    return next((tags for tags in _TAGS if tags.begin in template or tags.end in template), None)


def with_thoughts(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """A message with its thought where a chat template looks for it; left out where it does not look.

    Args:
        message: As clients send it.
        template: The source of the chat template.

    Example:
        >>> message = {"role": "assistant", "content": "Yes.", "thinking": "Hm."}
        >>> with_thoughts(message, "{{ message.reasoning_content }}")
        {'role': 'assistant', 'content': 'Yes.', 'reasoning_content': 'Hm.'}
        >>> with_thoughts(message, "{{ message.content.split('</think>') }}")["content"]
        '<think>\\nHm.\\n</think>\\n\\nYes.'
    """
    values = {name: value for name, value in message.items() if name not in THOUGHT_KEYS}
    thought = next((message[key] for key in THOUGHT_KEYS if message.get(key)), None)
    if thought is None:
        return values
    key = next((key for key in THOUGHT_KEYS if re.search(rf"\b{key}\b", template)), None)
    tags = thought_tags(template)
    if key is not None:
        values[key] = thought
    elif tags is not None and tags.end in template:
        content = values.get("content") or ""
        values["content"] = f"{tags.begin}\n{thought}\n{tags.end}\n\n{content}"
    return values


class ThoughtReader(Scanner):
    """Tells the thought that an answer begins with from what follows, in which another reader looks.

    Space around a thought is none of it. A thought that is never closed is all of the answer, and what
    looks like a call within it is a thought.

    Args:
        inner: Reads what follows.
        tags: What stands around the thought.
        is_open: Whether the prompt has opened it.
        goes_on: Whether the prompt ends within the thought, whose space is then part of it.

    Attributes:
        size: Characters up to the end of the thought and its tag, 0 without a thought; `None` while that
            is not known.

    Example:
        >>> from mlx_mmfree.generation.answer_parts import TextReader
        >>> reader = ThoughtReader(TextReader(), ThoughtTags("<think>", "</think>"), is_open=True)
        >>> [*reader.add("Two and t"), *reader.add("wo. </thi"), *reader.add("nk>4")]
        [ThinkingDelta(text='Two and t'), ThinkingDelta(text='wo.'), TextDelta(text='4')]
    """

    def __init__(self, inner: PartReader, tags: ThoughtTags, is_open: bool, goes_on: bool = False):
        self._inner = inner
        self._tags = tags
        self._is_open = is_open
        self._space: list[str] | None = [] if goes_on else None
        self.size: int | None = None
        self._passed = 0
        super().__init__()

    def add(self, text: str) -> list[Part]:
        self._passed += self._at
        return super().add(text)

    def finalize(self) -> list[Part]:
        return [*super().finalize(), *self._inner.finalize()]

    def _steps(self) -> Steps:
        # some models write the tag though the prompt has
        is_tagged = (yield from self._next()) == self._tags.begin[0] and (
            yield from self._tag(self._tags.begin)
        )
        if is_tagged or self._is_open:
            end = yield from self._until((self._tags.end,), self._think)
            self.size = None if end is None else self._passed + self._at
            while end is not None and not self._has_ended:
                self._at += len(self._text[self._at :]) - len(self._text[self._at :].lstrip())
                if self._at < len(self._text):
                    break
                yield
        else:
            self.size = 0
        yield from self._until((), self._pass)

    def _think(self, text: str) -> None:
        # space at the end of a thought is known once the thought goes on
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


_NONE = -1


class ThoughtBudget:
    """Ends a thought after some tokens by its closing tag. It is a `LogitsProcessor` of one text.

    Args:
        tokenizer: That of the model.
        tags: What stands around the thought.
        is_open: Whether the prompt has opened it.
        most: How many tokens it may have.

    Raises:
        ValueError: The number is negative.
    """

    def __init__(self, tokenizer: Any, tags: ThoughtTags, is_open: bool, most: int):
        if most < 0:
            raise ValueError(f"[generate] 'reasoning_budget' must be at least 0 but got {most}.")
        self._tokenizer = tokenizer
        self._tags = tags
        self._opens = is_open
        self._most = most
        closing = f"\n{tags.end}\n\n"
        self._closing: list[int] = tokenizer.encode_continuation(closing, parse_special=True)

    def copy(self) -> "ThoughtBudget":
        """The same for another text."""
        return ThoughtBudget(self._tokenizer, self._tags, self._opens, self._most)

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

"""The answers of completions and chats: texts, probabilities, numbers of tokens."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from ..generation.answers import answer_parts
from ..generation.answers.reasoning import ReasoningReader
from ..generation.scheduling import Event, Request, TokenLogprobs
from ..version import __version__
from .errors import RequestError
from .schemas import StreamOptions


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes that a token adds to a text; `None` if the tokenizer has no such token."""
    try:
        raw: bytes = tokenizer.token_bytes(token)
    except ValueError:
        return None
    return raw


_IMPOSSIBLE = -9999.0
"""The stand-in for the logarithm of 0, which JSON cannot write."""

Likely = tuple[int, TokenLogprobs]


class ShownTokens:
    """Writes tokens as clients read them.

    Args:
        tokenizer: Knows their bytes.
        end: Tokens that end a text; they are not shown.
    """

    def __init__(self, tokenizer: Any, end: Collection[int]):
        self._tokenizer = tokenizer
        self._end = end

    def detokenizer(self, after: Collection[int]) -> Any:
        """Gives the characters that each token adds to a text after some tokens."""
        return self._tokenizer.detokenizer(after=after)

    def text(self, token: int) -> str:
        """The text of a token; bytes that are no character alone are replaced."""
        return self._bytes(token).decode("utf-8", "replace")

    def likely(self, step: TokenLogprobs) -> list[tuple[int, float]]:
        """The likeliest tokens of a step that have a text."""
        return [
            (token, value)
            for token, value in step.top
            if token_bytes(self._tokenizer, token) is not None
        ]

    def number(self, value: float) -> float:
        """A logarithm of a probability, as JSON can write it."""
        return value if math.isfinite(value) else _IMPOSSIBLE

    def steps(self, events: Sequence[Event]) -> list[Likely]:
        """The tokens of some steps with their probabilities."""
        return [
            (event.token, event.logprobs)
            for event in events
            if event.token is not None
            and event.logprobs is not None
            and event.token not in self._end
        ]

    def entries(self, steps: Iterable[Likely]) -> Iterator[dict[str, Any]]:
        """Steps of a text with their probabilities, in the format of chats."""
        return (
            {
                **self._entry(token, likely.logprob),
                "top_logprobs": [self._entry(*each) for each in self.likely(likely)],
            }
            for token, likely in steps
        )

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        raw = self._bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": self.number(value), "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        return token_bytes(self._tokenizer, token) or b""


class Steps:
    """Tokens with their probabilities, which take a tenth of the memory that they take as events."""

    def __init__(self) -> None:
        self._tokens = array("q")
        self._values = array("d")
        self._counts = array("q")

    def add(self, steps: Sequence[Likely]) -> None:
        """Adds some."""
        for token, likely in steps:
            self._counts.append(len(likely.top))
            self._tokens.append(token)
            self._values.append(likely.logprob)
            for other, value in likely.top:
                self._tokens.append(other)
                self._values.append(value)

    def __iter__(self) -> Iterator[Likely]:
        start = 0
        for count in self._counts:
            stop = start + 1 + count
            top = zip(self._tokens[start + 1 : stop], self._values[start + 1 : stop], strict=True)
            token = self._tokens[start]
            yield token, TokenLogprobs(token, self._values[start], tuple(top))
            start = stop


@dataclass
class Usage:
    """Tokens that were read and written for one request.

    Attributes:
        texts_a_prompt: How many texts each prompt gets; the prompt counts once.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: The tokens among them that were cached.
        completion_tokens: Tokens written.
        reasoning_tokens: The tokens of reasoning among them.
    """

    texts_a_prompt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    _begun: set[int] = field(default_factory=set)

    def add(self, index: int, event: Event) -> None:
        """Counts a step of a text, by the number of the text."""
        self.completion_tokens += event.token is not None
        if index % self.texts_a_prompt == 0 and index not in self._begun:
            self._begun.add(index)
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


Batch = Sequence[tuple[int, Event]]
Sent = dict[str, Any]


class Answer(ABC):
    """The answer to one request as it grows, in the format of an interface.

    Attributes:
        usage: What it has taken so far.
        is_stream: Whether its events are sent, and it is never needed as a whole.
        names_events: Whether each event of a stream has its `type` as its name.
        last_line: What a stream ends with after its last event.
    """

    names_events: ClassVar[bool] = True
    last_line: ClassVar[bytes] = b""
    usage: Usage
    is_stream: bool = False

    def add(self, batch: Batch) -> list[Sent]:
        """Takes what was written and returns the events that tell of it."""
        of_text: dict[int, list[Event]] = {}
        for index, event in batch:
            self.usage.add(index, event)
            of_text.setdefault(index, []).append(event)
        return [sent for index, events in of_text.items() for sent in self._added(index, events)]

    def opening(self) -> list[Sent]:
        """The events that a stream begins with."""
        return []

    def waiting(self) -> list[Sent]:
        """The events that tell a client that it still has to wait; none: a comment does."""
        return []

    def closing(self) -> list[Sent]:
        """The events that a stream ends with."""
        return []

    def failed(self, error: RequestError) -> list[Sent]:
        """The events that tell of an error, after which nothing follows."""
        return [error.body()]

    @abstractmethod
    def whole(self) -> Sent:
        """The answer, once it is complete; iterators in it stand for lists."""

    @abstractmethod
    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        """The events that tell of some steps of one text."""


Choice = dict[str, Any]


class ChoiceAnswer(Answer):
    """An answer that is a list of choices.

    Args:
        prefix: What its identifier begins with.
        kind: The `object` of the whole answer.
        chunk_kind: The `object` of a chunk of it.
        model: The name of the model.
        texts: How many texts were asked for.
        texts_a_prompt: How many of them each prompt gets.
        shows_usage: When a stream says how many tokens it has taken.
    """

    names_events = False
    last_line = b"data: [DONE]\n\n"
    _shown: ShownTokens | None = None

    def __init__(
        self,
        prefix: str,
        kind: str,
        chunk_kind: str,
        model: str,
        texts: int,
        texts_a_prompt: int,
        shows_usage: StreamOptions,
    ):
        self.usage = Usage(texts_a_prompt)
        self._texts = texts
        self._kind = kind
        self._shows_usage = shows_usage
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mmfree-{__version__}",
        }
        self._chunk_head = {**self._head, "object": chunk_kind}

    def closing(self) -> list[Sent]:
        is_last = self._shows_usage.include_usage
        if not is_last:
            return []
        return [{**self._chunk_head, "choices": [], "usage": self.usage.as_json()}]

    def whole(self) -> Sent:
        choices: Any = (self._choice(index) for index in range(self._texts))
        if self._shown is None:
            choices = list(choices)
        head = {**self._head, "object": self._kind}
        return {**head, "choices": choices, "usage": self.usage.as_json()}

    def _added(self, index: int, events: Sequence[Event]) -> list[Sent]:
        chunk = self._chunk(index, events)
        if chunk is None:
            return []
        so_far = self._shows_usage.include_usage and self._shows_usage.continuous_usage_stats
        # clients expect one choice a chunk
        usage = {"usage": self.usage.as_json()} if so_far else {}
        return [{**self._chunk_head, "choices": [chunk], **usage}]

    @abstractmethod
    def _chunk(self, index: int, events: Sequence[Event]) -> Choice | None:
        """The addition to a text by some steps; `None` for nothing that is shown."""

    @abstractmethod
    def _choice(self, index: int) -> Choice:
        """A whole text."""


@dataclass
class _Continuation:
    detokenizer: Any = None
    parts: list[str] = field(default_factory=list)
    size: int = 0
    steps: Steps = field(default_factory=Steps)
    finish_reason: str | None = None


class CompletionAnswer(ChoiceAnswer):
    """Texts that continue prompts.

    Args:
        model: The name of the model.
        texts: The texts that were asked for.
        texts_a_prompt: How many of them each prompt gets.
        shown: Writes tokens with their probabilities; `None` shows none.
        shows_usage: When a stream says how many tokens it has taken.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[Request],
        texts_a_prompt: int,
        shown: ShownTokens | None,
        shows_usage: StreamOptions,
    ):
        kind = "text_completion"
        super().__init__("cmpl", kind, kind, model, len(texts), texts_a_prompt, shows_usage)
        self._shown = shown
        self._all = [_Continuation(shown and shown.detokenizer(text.tokens)) for text in texts]

    def _chunk(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        added = "".join(event.text for event in events)
        text.parts.append(added)
        text.finish_reason = events[-1].finish_reason
        tokens: dict[str, Any] = {}
        if self._shown is not None and (steps := self._shown.steps(events)):
            if self.is_stream:
                tokens = self._tokens(self._shown, text, steps)
                tokens["top_logprobs"] = list(tokens["top_logprobs"])
            else:
                text.steps.add(steps)
        if not added and text.finish_reason is None and not tokens:
            return None
        return {
            "index": index,
            "text": added,
            "logprobs": tokens or None,
            "finish_reason": text.finish_reason,
        }

    def _tokens(
        self, shown: ShownTokens, text: _Continuation, steps: Iterable[Likely]
    ) -> dict[str, Any]:
        """The probabilities of some steps, by what they say."""
        names, logprobs, offsets = [], [], []
        for token, likely in steps:
            name = shown.text(token)
            characters = text.detokenizer.add(token) if name else ""
            if not text.size and name == f" {characters}":
                # the space before a text that begins anew is not shown
                name = characters
            names.append(name)
            logprobs.append(shown.number(likely.logprob))
            offsets.append(text.size)
            text.size += len(characters)
        top = (
            {shown.text(other): shown.number(value) for other, value in shown.likely(likely)}
            for _, likely in steps
        )
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        return {
            "index": index,
            "text": "".join(text.parts),
            "logprobs": self._shown and self._tokens(self._shown, text, text.steps),
            "finish_reason": text.finish_reason,
        }


class TextParts:
    """Takes the text of an answer apart, and counts the tokens of its reasoning.

    Args:
        reader: Finds the parts.

    Attributes:
        blocks: What they make.
    """

    def __init__(self, reader: answer_parts.PartReader):
        self._reader = reader
        self.blocks = answer_parts.Blocks()
        # where each token begins that is, or may become, one of the reasoning
        self._starts: list[int] = []
        self._size = 0
        self._may_think = isinstance(reader, ReasoningReader)

    def add(self, events: Sequence[Event]) -> list[answer_parts.Change]:
        """The changes of the blocks by some steps of the text."""
        for event in events if self._may_think else ():
            self._starts.append(self._size)
            self._size += len(event.text)
        parts = self._reader.add("".join(event.text for event in events))
        reason, stop_string = events[-1].finish_reason, events[-1].stop_string
        if reason is not None:
            parts = [*parts, *self._reader.finalize(), answer_parts.Finish(reason, stop_string)]
        # what might have become reasoning is known at the end
        if self._may_think and (size := cast(ReasoningReader, self._reader).size) is not None:
            self._may_think = False
            self._starts = [start for start in self._starts if start < size]
        return [change for part in parts for change in self.blocks.add(part)]

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning has, its closing tag included."""
        return len(self._starts)


@dataclass
class _Message:
    parts: TextParts
    calls: list[int] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)

    @property
    def finish_reason(self) -> str | None:
        return self.parts.blocks.reason


class ChatAnswer(ChoiceAnswer):
    """Messages that answer a conversation.

    Args:
        model: The name of the model.
        texts: How many messages were asked for.
        make_reader: Makes what takes a message apart.
        shown: Writes tokens with their probabilities; `None` shows none.
        shows_usage: When a stream says how many tokens it has taken.
    """

    def __init__(
        self,
        model: str,
        texts: int,
        make_reader: Callable[[], answer_parts.PartReader],
        shown: ShownTokens | None,
        shows_usage: StreamOptions,
    ):
        kind = "chat.completion"
        super().__init__("chatcmpl", kind, f"{kind}.chunk", model, texts, texts, shows_usage)
        self._shown = shown
        self._all = [_Message(TextParts(make_reader())) for _ in range(texts)]

    def opening(self) -> list[Sent]:
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._texts)
        ]
        return [{**self._chunk_head, "choices": choices}]

    def _chunk(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        delta: dict[str, Any] = {}
        before = text.parts.reasoning_tokens
        for change in text.parts.add(events):
            _add_to_delta(delta, change, text.calls)
        self.usage.reasoning_tokens += text.parts.reasoning_tokens - before
        steps = [] if self._shown is None else self._shown.steps(events)
        tokens: list[dict[str, Any]] = []
        if self._shown is not None and self.is_stream:
            tokens = list(self._shown.entries(steps))
        else:
            text.steps.add(steps)
        if not delta and text.finish_reason is None and not tokens:
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(tokens) if tokens else None,
            "finish_reason": text.finish_reason,
        }

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        for block in text.parts.blocks.whole:
            if block.kind == "tool_call":
                message.setdefault("tool_calls", []).append(_call(block, block.text))
            else:
                name = _TEXTS[block.kind]
                message[name] = message.get(name, "") + block.text
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "logprobs": self._shown and _logprobs(self._shown.entries(text.steps)),
            "finish_reason": text.finish_reason,
        }


_TEXTS: dict[answer_parts.Kind, str] = {"thinking": "reasoning_content", "text": "content"}


def _add_to_delta(delta: dict[str, Any], change: answer_parts.Change, calls: list[int]) -> None:
    """Adds a change to a chunk of a message, in which each name stands once.

    Args:
        delta: The chunk.
        change: The change.
        calls: The numbers of the blocks that are calls, to which a new one is added.
    """
    block = change.block
    if change.kind == "end":
        return
    if block.kind != "tool_call":
        if change.kind == "grow":
            name = _TEXTS[block.kind]
            delta[name] = delta.get(name, "") + block.text
        return
    chunks = delta.setdefault("tool_calls", [])
    if change.kind == "begin":
        calls.append(change.index)
        chunks.append({"index": len(calls) - 1, **_call(block, "")})
        return
    index = calls.index(change.index)
    if not chunks or chunks[-1]["index"] != index:
        chunks.append({"index": index, "function": {"arguments": ""}})
    chunks[-1]["function"]["arguments"] += block.text


def _call(call: answer_parts.Block, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(tokens: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}

"""What clients read: texts, probabilities and numbers of tokens, in OpenAI's form."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..generation.scheduling import Event, Request, TokenLogprobs
from ..version import __version__
from .tools import CallReader, Part, ToolCall


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """The bytes that a token adds to a text; `None` if the tokenizer has no such token."""
    try:
        raw: bytes = tokenizer.token_bytes(token)
    except ValueError:
        return None
    return raw


_IMPOSSIBLE = -9999.0
"""What stands for the logarithm of 0, which JSON cannot write."""

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

    def entries(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        """Steps of a text with their probabilities, in the form of chats."""
        return [
            {
                **self._entry(token, likely.logprob),
                "top_logprobs": [self._entry(*each) for each in self.likely(likely)],
            }
            for token, likely in self.steps(events)
        ]

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        raw = self._bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": self.number(value), "bytes": list(raw)}

    def _bytes(self, token: int) -> bytes:
        return token_bytes(self._tokenizer, token) or b""


@dataclass
class Usage:
    """Tokens that were read and written for one request.

    Attributes:
        texts_a_prompt: How many texts each prompt gets; the prompt counts once.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: Those of them that were not read again.
        completion_tokens: Tokens written.
    """

    texts_a_prompt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
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
        }


Choice = dict[str, Any]
Batch = Sequence[tuple[int, Event]]


class Answer(ABC):
    """The answer to one request as it grows.

    Args:
        prefix: What its identifier begins with.
        kind: The `object` of the whole answer.
        chunk_kind: The `object` of a piece of it.
        model: The name of the model.
        texts: How many texts were asked for.
        texts_a_prompt: How many of them each prompt gets.

    Attributes:
        usage: What it has taken so far.
    """

    def __init__(
        self, prefix: str, kind: str, chunk_kind: str, model: str, texts: int, texts_a_prompt: int
    ):
        self._texts = texts
        self._kind = kind
        self._chunk_kind = chunk_kind
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"mmfree-{__version__}",
        }
        self.usage = Usage(texts_a_prompt)

    def add(self, batch: Batch) -> list[Choice]:
        """Takes what was written and returns what it adds, as pieces of texts."""
        of_text: dict[int, list[Event]] = {}
        for index, event in batch:
            self.usage.add(index, event)
            of_text.setdefault(index, []).append(event)
        pieces = [self._piece(index, events) for index, events in of_text.items()]
        return [piece for piece in pieces if piece is not None]

    def chunk(self, choices: Sequence[Choice], usage: bool = False) -> dict[str, Any]:
        """A piece of a streamed answer."""
        chunk = {**self._head, "object": self._chunk_kind, "choices": list(choices)}
        return chunk | ({"usage": self.usage.as_json()} if usage else {})

    def whole(self) -> dict[str, Any]:
        """The answer, once it is complete."""
        choices = [self._choice(index) for index in range(self._texts)]
        usage = self.usage.as_json()
        return {**self._head, "object": self._kind, "choices": choices, "usage": usage}

    def opening(self) -> list[Choice]:
        """The pieces that a stream begins with."""
        return []

    @abstractmethod
    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        """What steps of one text add to it; `None` for nothing that is shown."""

    @abstractmethod
    def _choice(self, index: int) -> Choice:
        """A whole text."""


@dataclass
class _Continuation:
    detokenizer: Any = None
    parts: list[str] = field(default_factory=list)
    size: int = 0
    tokens: dict[str, list[Any]] = field(
        default_factory=lambda: {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
    )
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """Texts that continue prompts.

    Args:
        model: The name of the model.
        texts: The texts that were asked for.
        texts_a_prompt: How many of them each prompt gets.
        shown: Writes tokens with their probabilities; `None` shows none.
    """

    def __init__(
        self,
        model: str,
        texts: Sequence[Request],
        texts_a_prompt: int,
        shown: ShownTokens | None,
    ):
        kind = "text_completion"
        super().__init__("cmpl", kind, kind, model, len(texts), texts_a_prompt)
        self._shown = shown
        self._all = [_Continuation(shown and shown.detokenizer(text.tokens)) for text in texts]

    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        added = "".join(event.text for event in events)
        text.parts.append(added)
        text.finish_reason = events[-1].finish_reason
        tokens = {} if self._shown is None else self._tokens(self._shown, text, events)
        if not added and text.finish_reason is None and not tokens:
            return None
        return _continuation(index, added, tokens or None, text.finish_reason)

    def _tokens(
        self, shown: ShownTokens, text: _Continuation, events: Sequence[Event]
    ) -> dict[str, list[Any]]:
        """The probabilities of some steps, by what they say."""
        added: dict[str, list[Any]] = {name: [] for name in text.tokens}
        for token, likely in shown.steps(events):
            name = shown.text(token)
            characters = text.detokenizer.add(token) if name else ""
            if not text.size and name == f" {characters}":
                # the space before a text that begins anew is not shown
                name = characters
            added["tokens"].append(name)
            added["token_logprobs"].append(shown.number(likely.logprob))
            added["top_logprobs"].append(
                {shown.text(t): shown.number(value) for t, value in shown.likely(likely)}
            )
            added["text_offset"].append(text.size)
            text.size += len(characters)
        for name, values in added.items():
            text.tokens[name] += values
        return added if added["tokens"] else {}

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        tokens = None if self._shown is None else text.tokens
        return _continuation(index, "".join(text.parts), tokens, text.finish_reason)


def _continuation(index: int, text: str, tokens: Any, finish_reason: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": tokens, "finish_reason": finish_reason}


@dataclass
class _Message:
    reader: CallReader | None
    parts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class ChatAnswer(Answer):
    """Messages that answer a conversation.

    Args:
        model: The name of the model.
        texts: How many messages were asked for.
        make_reader: Makes what finds calls of tools in a message; `None` without tools.
        shown: Writes tokens with their probabilities; `None` shows none.
    """

    def __init__(
        self,
        model: str,
        texts: int,
        make_reader: Callable[[], CallReader] | None,
        shown: ShownTokens | None,
    ):
        kind = "chat.completion"
        super().__init__("chatcmpl", kind, f"{kind}.chunk", model, texts, texts)
        self._shown = shown
        self._all = [_Message(make_reader() if make_reader else None) for _ in range(texts)]

    def opening(self) -> list[Choice]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self._texts)
        ]

    def _piece(self, index: int, events: Sequence[Event]) -> Choice | None:
        text = self._all[index]
        parts = self._parts(text, events)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = len(text.calls)
            delta["tool_calls"] = [
                {"index": first + number, **call.as_json()} for number, call in enumerate(calls)
            ]
        text.parts.append(content)
        text.calls += calls
        text.finish_reason = events[-1].finish_reason
        if text.finish_reason == "stop" and text.calls:
            text.finish_reason = "tool_calls"
        tokens = [] if self._shown is None else self._shown.entries(events)
        text.tokens += tokens
        if not delta and text.finish_reason is None and not tokens:
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": _logprobs(tokens) if tokens else None,
            "finish_reason": text.finish_reason,
        }

    def _parts(self, text: _Message, events: Sequence[Event]) -> list[Part]:
        added = "".join(event.text for event in events)
        if text.reader is None:
            return [added]
        parts = text.reader.add(added)
        is_last = events[-1].finish_reason is not None
        return parts + text.reader.finalize() if is_last else parts

    def _choice(self, index: int) -> Choice:
        text = self._all[index]
        content = "".join(text.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if text.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.as_json() for call in text.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if self._shown is None else _logprobs(text.tokens),
            "finish_reason": text.finish_reason,
        }


def _logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": tokens, "refusal": None}

"""A request on its way through a scheduler."""

from typing import Any

import mlx.core as mx

from ..completion import Completion
from .beginnings import Beginning
from .request import Event, Request, TokenLogprobs


class Row:
    """A request on its way: what it waits for, and the text that it has so far.

    Args:
        number: That of the request.
        request: What was asked.
        tokenizer: Turns tokens into text.

    Attributes:
        key: That of its next random numbers.
        seen: What its processors have seen, once it writes.
        beginning: All of its prompt but the last token, until it writes; `None`: nobody reads it yet.
        cached_tokens: How many tokens of the prompt were not read for this request.
        is_over: No event follows.
        has_failed: Its state is worth nothing.
    """

    def __init__(self, number: int, request: Request, tokenizer: Any):
        self.number = number
        self.request = request
        self.tokens = [int(token) for token in request.tokens]
        after = () if request.is_answer else self.tokens
        self.completion = Completion(
            tokenizer, request.stop, request.end, request.max_tokens, after
        )
        self.key = _key(request.seed)
        self.seen: list[Any] = []
        self.beginning: Beginning | None = None
        self.cached_tokens = 0
        self.is_over = False
        self.has_failed = False

    @property
    def read(self) -> list[int]:
        """The tokens that the model has read, once the row writes."""
        return self.tokens + self.completion.tokens

    @property
    def read_count(self) -> int:
        """How many those are."""
        return len(self.tokens) + len(self.completion.tokens)

    @property
    def is_written(self) -> bool:
        """Whether the model need read no further token of it."""
        return self.completion.finish_reason is not None or self.completion.remaining <= 1

    def start(self, vocab_size: int) -> None:
        """Lets the processors see the prompt."""
        tokens = mx.array([self.tokens], mx.int32)
        self.seen = [process.start(tokens, None, vocab_size) for process in self.request.processors]

    def event(
        self,
        text: str = "",
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        error: Exception | None = None,
    ) -> Event:
        """What a step has done for it."""
        return Event(
            request=self.number,
            text=text,
            token=token,
            logprobs=logprobs,
            finish_reason=self.completion.finish_reason,
            prompt_tokens=len(self.tokens),
            cached_tokens=self.cached_tokens,
            error=error,
        )


def _key(seed: int | None) -> mx.array:
    if seed is None:
        return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
    return mx.random.key(seed % 2**64)

"""Requests on their way: the prompt that is read, and the text so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..answers.completion import Completion
from .requests import Request

State = Any


@dataclass(eq=False)
class Prefix:
    """The first tokens of one or several prompts, and what the model keeps of them.

    Attributes:
        tokens: A prompt.
        length: How many of its tokens they are.
        before: A shorter prefix of the prompt, to go on from; `None`: `state` is where to go on.
        position: How many tokens `state` has read.
        state: What the model keeps of them, in the ordinary variant, for a batch of one; `None`:
            nothing.
    """

    tokens: Sequence[int]
    length: int
    before: "Prefix | None"
    position: int
    state: State

    @property
    def is_read(self) -> bool:
        """True if `state` is that after all of its tokens."""
        return self.position == self.length and self.before is None

    @property
    def computed(self) -> tuple[Sequence[int], State]:
        """The tokens that are read on the way to this one, and the state after them."""
        part = self.next_unread()
        return part.tokens[: part.position], part.state

    def next_unread(self) -> "Prefix":
        """The text to read next on the way to this one: itself, or a shorter one.

        It then goes on from where the one before it has ended.
        """
        part = self
        while part.before is not None and not part.before.is_read:
            part = part.before
        if part.before is not None:
            part.position, part.state = part.before.position, part.before.state
            part.before = None
        return part


class Row:
    """A request on its way: what it waits for, and the text that it has so far.

    Args:
        number: The number of the request.
        request: What was asked.
        tokenizer: Turns tokens into text.

    Attributes:
        ends: Numbers of tokens of its prompt after which its state is stored, ascending.
        key: The key of its next random numbers.
        seen: What its processors have seen, once it writes.
        prefix: All of its prompt but the last token, until it writes; `None`: nobody reads it yet.
        cached_tokens: How many tokens of the prompt were not read for this request.
        before_stop: While its last tokens may be a stop string: the number of tokens before them, and by
            mixers the states after those; `None` for what can be shortened.
        num_stored: How many tokens of its prompt can be found while it is read and written.
        is_over: No event follows.
        has_failed: Its state is worth nothing.
    """

    def __init__(self, number: int, request: Request, tokenizer: Any):
        self.number = number
        self.request = request
        self.tokens = [int(token) for token in request.tokens]
        last = len(self.tokens) - 1
        self.ends = sorted({*(mark for mark in request.breakpoints if mark < last), last})
        after = () if request.is_answer else self.tokens
        stop = request.stop if request.ending is None else request.ending()
        self.completion = Completion(tokenizer, stop, request.end, request.max_tokens, after)
        if request.seed is None:
            self.key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        else:
            self.key = mx.random.key(request.seed % 2**64)
        self.seen: list[Any] = []
        self.prefix: Prefix | None = None
        self.cached_tokens = 0
        self.before_stop: tuple[int, list[State | None]] | None = None
        self.num_stored = 0
        self.is_over = False
        self.has_failed = False

    @property
    def read(self) -> list[int]:
        """The tokens that the model has read, once the row writes."""
        return self.tokens + self.completion.tokens

    @property
    def unstored_ends(self) -> list[int]:
        """The `ends` that the model has read and that cannot be found yet."""
        count = len(self.tokens)
        if self.prefix is not None:
            count = self.prefix.next_unread().position
        return [end for end in self.ends if self.num_stored < end <= count]

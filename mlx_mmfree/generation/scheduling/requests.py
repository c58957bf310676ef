"""Requests of a scheduler: what is asked, what has become of it, and its way there."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from ...models.parts.stack import check_tokens
from ..decode import Completion, FinishReason, check_max_tokens
from ..sampling import LogitsProcessor, Sampler, greedy

State = Any


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Attributes:
        tokens: The ids of the whole prompt, at least one.
        max_tokens: How many tokens to generate at most; fewer where the model's longest text ends.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`. Their states belong to the text.
        stop: Strings that end the text and are not shown.
        end: Tokens that end the text.
        seed: Of the text's own random numbers, which no other text changes; `None`: one is drawn from
            MLX's generator. A sampler that is not of `make_sampler` uses that generator at each token.
        top_logprobs: How many of the likeliest tokens are told with their log-probabilities at each
            step; 0: only the chosen one; `None`: none.
        marks: Numbers of tokens of the prompt after which the state is kept too, such as at the ends
            of messages. Prompts that are alike up to a mark are read once up to there.
        is_answer: Whether the text is a text of its own, and does not go on from the prompt's last word.

    Example:
        >>> request = Request([1, 2, 3], max_tokens=20, seed=7)
        >>> request.max_tokens
        20
    """

    tokens: Sequence[int]
    max_tokens: int = 100
    sampler: Sampler = greedy
    processors: Sequence[LogitsProcessor] = ()
    stop: Sequence[str] = ()
    end: Collection[int] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    marks: Sequence[int] = ()
    is_answer: bool = False

    def check(self, vocab_size: int, max_length: int | None) -> None:
        """Refuses what a model cannot do.

        Args:
            vocab_size: How many tokens it knows.
            max_length: The most tokens of a text that it reads; `None`: any number.

        Raises:
            ValueError: The prompt is empty, too long or has a token outside the vocabulary, or a number
                is out of its bounds.
        """
        if len(self.tokens) == 0:
            raise ValueError("[scheduler] 'prompt' must not be empty. Give at least one token.")
        check_tokens(self.tokens, vocab_size)
        if max_length is not None and len(self.tokens) > max_length:
            raise ValueError(
                f"[scheduler] 'prompt' must have at most {max_length} tokens for this model but has "
                f"{len(self.tokens)}."
            )
        check_max_tokens(self.max_tokens)
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= vocab_size:
            raise ValueError(
                f"[scheduler] 'top_logprobs' must be between 0 and {vocab_size}, the vocabulary, but "
                f"got {self.top_logprobs}."
            )
        for mark in self.marks:
            if not 0 < mark <= len(self.tokens):
                raise ValueError(
                    f"[scheduler] 'marks' must lie between 1 and {len(self.tokens)}, the number of "
                    f"tokens, but hold {mark}."
                )


@dataclass(frozen=True)
class TokenLogprobs:
    """What the model's probabilities of one step were, before penalties and temperature.

    Attributes:
        token: The token that was chosen.
        logprob: The logarithm of its probability.
        top: The likeliest tokens with theirs, first to last.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One step of one request.

    Attributes:
        request: The number that `Scheduler.submit` gave it.
        text: The text that this step adds, possibly none.
        token: The token that was chosen; `None` where the request failed.
        logprobs: Its log-probability and those of the likeliest tokens, if they were asked for.
        finish_reason: `"stop"` at a stop string or the end of the text, `"length"` at the last token
            allowed, otherwise `None`.
        prompt_tokens: Number of tokens of the prompt.
        cached_tokens: How many of them were known, or read for another request.
        error: Why this request, alone, has failed; it is then over.
        stop_string: The stop string that has ended the text, if one has.
    """

    request: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    error: Exception | None = None
    stop_string: str | None = None

    @property
    def is_last(self) -> bool:
        """Whether no other event of the request follows."""
        return self.finish_reason is not None or self.error is not None


@dataclass(eq=False)
class Beginning:
    """The first tokens of one or several prompts, and what the model keeps of them.

    Attributes:
        tokens: A prompt.
        length: How many of its tokens they are.
        before: A shorter beginning of it, to go on from; `None`: `state` is where to go on.
        position: How many tokens `state` has read.
        state: What the model keeps of them, in the ordinary form, for a batch of one.
    """

    tokens: Sequence[int]
    length: int
    before: "Beginning | None"
    position: int
    state: State

    @property
    def is_read(self) -> bool:
        """Whether `state` is that after all of its tokens."""
        return self.position == self.length and self.before is None

    def next_unread(self) -> "Beginning":
        """What must be read next on the way to this one: itself, or a shorter one.

        It then goes on from where the one before it has ended.
        """
        part = self
        while part.before is not None and not part.before.is_read:
            part = part.before
        if part.before is not None:
            part.position, part.state = part.before.position, part.before.state
            part.before = None
        return part


class Beginnings:
    """Finds the beginnings that are being read, so that prompts which are alike share them."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, bytes], Beginning] = WeakValueDictionary()

    def of(
        self, tokens: Sequence[int], marks: Sequence[int], position: int, state: State
    ) -> tuple[Beginning, int]:
        """All tokens of a prompt but the last, to be read in parts.

        Args:
            tokens: The prompt.
            marks: Numbers of tokens after which a part ends.
            position: How many tokens are known.
            state: What the model keeps of them.

        Returns:
            The longest beginning, which goes on from shorter ones, and how many of its tokens are known
            or read for another prompt.
        """
        last = len(tokens) - 1
        digest, start = blake2b(digest_size=16), 0
        array = np.array(tokens, np.int32)
        whole: Beginning | None = None
        for end in sorted({mark for mark in marks if position < mark < last} | {last}):
            digest.update(array[start:end].tobytes())
            start = end
            key = (end, digest.digest())
            known = self._known.get(key)
            if known is None:
                whole = Beginning(tokens, end, whole, position, state)
                self._known[key] = whole
            else:
                whole, position = known, end
        assert whole is not None
        return whole, position


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
        held: While its last tokens may be a stop string: the number of tokens before them, and by
            mixers the states after those; `None` for what can be shortened.
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
        if request.seed is None:
            self.key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        else:
            self.key = mx.random.key(request.seed % 2**64)
        self.seen: list[Any] = []
        self.beginning: Beginning | None = None
        self.cached_tokens = 0
        self.held: tuple[int, list[State | None]] | None = None
        self.is_over = False
        self.has_failed = False

    @property
    def read(self) -> list[int]:
        """The tokens that the model has read, once the row writes."""
        return self.tokens + self.completion.tokens

    @property
    def is_written(self) -> bool:
        """Whether the model need read no further token of it."""
        return self.completion.finish_reason is not None or self.completion.remaining <= 1

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
            stop_string=self.completion.stop_string,
        )

"""What is asked of a scheduler, and what it says at each step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...models.parts.tokens import check_tokens
from ..completion import FinishReason
from ..decode import check_max_tokens
from ..penalties import LogitsProcessor
from ..prompt_ids import check_not_empty
from ..samplers import Sampler, greedy


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
        check_not_empty(self.tokens, "scheduler")
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
    """

    request: int
    text: str
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """Whether no other event of the request follows."""
        return self.finish_reason is not None or self.error is not None

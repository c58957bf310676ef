"""Requests to continue a text, and the events that answer them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..answers.completion import FinishReason
from ..answers.stop_strings import TextEnd
from ..sampling import LogitsProcessor, Sampler, greedy


@dataclass(frozen=True)
class Request:
    """One text to continue.

    Attributes:
        tokens: The ids of the whole prompt, at least one.
        max_tokens: How many tokens to generate at most; fewer where the model's longest text ends.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`. Their states belong to the text.
        stop: Strings that end the text and are not shown.
        ending: Makes what ends the text instead of `stop`; `None`: nothing else does.
        end: Tokens that end the text.
        seed: Of the text's own random numbers, which no other text changes; `None`: one is drawn from
            MLX's generator. A sampler that is not of `make_sampler` uses that generator at each token.
        top_logprobs: How many of the likeliest tokens are reported with their log-probabilities at each
            step; 0: only the chosen one; `None`: none.
        breakpoints: Numbers of tokens of the prompt after which the state is kept too, such as at the
            ends of messages. Prompts that are alike up to a breakpoint are read once up to there.
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
    ending: Callable[[], TextEnd] | None = None
    end: Collection[int] = ()
    seed: int | None = None
    top_logprobs: int | None = None
    breakpoints: Sequence[int] = ()
    is_answer: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """The model's probabilities of one step, before penalties and temperature.

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
        logprobs: Its log-probability and the likeliest tokens', if they were asked for.
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

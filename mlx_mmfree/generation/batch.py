"""Text generation for several prompts at once."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import mlx.core as mx

from ..models import Decoder
from ..platform.units import BYTES_PER_GB
from .completion import FinishReason
from .decode import PREFILL_STEP_SIZE, check_max_tokens
from .penalties import LogitsProcessor
from .prompt_ids import Prompt, prompt_tokens
from .samplers import Sampler, greedy
from .scheduling import Event, Request, Scheduler
from .stop import end_tokens
from .text import rate

BatchProgress = Callable[[int, int], bool]


@dataclass(frozen=True)
class BatchStats:
    """What a batch took.

    Attributes:
        prompt_tokens: Tokens of all prompts.
        prompt_tps: Tokens of the prompts read per second of `prompt_time`.
        prompt_time: Seconds of the steps that read prompts or gave some of them their first tokens.
        generation_tokens: Tokens generated.
        generation_tps: Tokens generated per second in the other steps.
        generation_time: Seconds of those steps.
        peak_memory: The most memory that MLX has used, in GB.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> stats = batch_generate(model, tokenizer, ["Once", "One day"], max_tokens=4).stats
        >>> stats.generation_tokens
        8
    """

    prompt_tokens: int
    prompt_tps: float
    prompt_time: float
    generation_tokens: int
    generation_tps: float
    generation_time: float
    peak_memory: float


@dataclass(frozen=True)
class BatchResponse:
    """The texts for several prompts, in their order.

    Attributes:
        texts: The new text for each prompt.
        tokens: The tokens generated for each prompt.
        prompt_tokens: Number of tokens of each prompt.
        finish_reasons: Why each text ended, `"stop"` or `"length"`; `None` where it did not.
        stats: What the batch took.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> response = batch_generate(model, tokenizer, ["Once upon"], max_tokens=4)
        >>> response.prompt_tokens, [len(tokens) for tokens in response.tokens]
        ([2], [4])
    """

    texts: list[str]
    tokens: list[list[int]]
    prompt_tokens: list[int]
    finish_reasons: list[FinishReason | None]
    stats: BatchStats


def batch_generate(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 100,
    sampler: Sampler = greedy,
    processors: Sequence[LogitsProcessor] = (),
    stop: Sequence[str] = (),
    extra_eos_tokens: Collection[int | str] = (),
    batch_size: int = 32,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    progress: BatchProgress | None = None,
    is_answer: bool = False,
) -> BatchResponse:
    """Continues several prompts, up to `batch_size` of them together.

    Prompts of similar length are read together, padded on the left. A text that is finished makes room
    for the next prompt. Each text draws its own random numbers, from a seed of MLX's generator.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        prompts: Texts, or ids as they are.
        max_tokens: How many tokens to generate at most for each.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`.
        stop: Strings that end a text and are not shown.
        extra_eos_tokens: Ids or texts of tokens that end a text beside the tokenizer's own.
        batch_size: How many prompts are decoded together at most.
        prefill_step_size: Positions of the prompts read at a time.
        progress: Called at each step with how many prompts are finished, and how many there are;
            where it returns `False`, generation ends with what there is.
        is_answer: As for `stream_generate`.

    Returns:
        The texts in the order of the prompts, and what the batch took.

    Raises:
        ValueError: A prompt is empty or not in the vocabulary, or an option is out of its bounds.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> batch_generate(model, tokenizer, ["Once upon a time", "One day"], max_tokens=4).texts
        [', there was a', ', she went to']
    """
    check_max_tokens(max_tokens)
    if batch_size < 1:
        raise ValueError(f"[batch_generate] 'batch_size' must be at least 1 but got {batch_size}.")
    rows = [prompt_tokens(tokenizer, prompt, model.vocab_size) for prompt in prompts]
    end = end_tokens(tokenizer, extra_eos_tokens)
    scheduler = Scheduler(
        model, tokenizer, max_rows=batch_size, prefill_step_size=prefill_step_size
    )
    # prompts of similar length are read together
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    texts = [_Text() for _ in rows]
    by_number = {
        scheduler.submit(
            Request(
                rows[index],
                max_tokens=max_tokens,
                sampler=sampler,
                processors=processors,
                stop=stop,
                end=end,
                is_answer=is_answer,
            )
        ): texts[index]
        for index in order
    }
    clock = _Clock()
    while scheduler.has_work:
        events = clock.step(scheduler)
        for event in events:
            by_number[event.request].add(event)
        done = sum(text.finish_reason is not None for text in texts)
        if events and progress is not None and not progress(done, len(rows)):
            break
    return BatchResponse(
        texts=["".join(text.parts) for text in texts],
        tokens=[text.tokens for text in texts],
        prompt_tokens=[len(row) for row in rows],
        finish_reasons=[text.finish_reason for text in texts],
        stats=clock.stats(
            sum(len(row) for row, text in zip(rows, texts, strict=True) if text.tokens),
            sum(len(text.tokens) for text in texts),
        ),
    )


class _Text:
    """One text as it grows."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        if event.error is not None:
            raise event.error
        self.parts.append(event.text)
        self.tokens.append(cast(int, event.token))
        self.finish_reason = event.finish_reason


class _Clock:
    """Tells the time that prompts take from that of the texts."""

    def __init__(self) -> None:
        self._begun: set[int] = set()
        self._prompt_time = self._generation_time = 0.0
        self._generated = 0

    def step(self, scheduler: Scheduler) -> list[Event]:
        """A step of the scheduler, which is timed."""
        start, read = perf_counter(), scheduler.tokens_read
        events = scheduler.step()
        time = perf_counter() - start
        numbers = {event.request for event in events}
        if scheduler.tokens_read > read or not numbers <= self._begun:
            self._prompt_time += time
        else:
            self._generation_time += time
            self._generated += len(events)
        self._begun |= numbers
        return events

    def stats(self, read: int, written: int) -> BatchStats:
        """What was measured, of so many tokens read and written."""
        return BatchStats(
            prompt_tokens=read,
            prompt_tps=rate(read, self._prompt_time),
            prompt_time=self._prompt_time,
            generation_tokens=written,
            generation_tps=rate(self._generated, self._generation_time),
            generation_time=self._generation_time,
            peak_memory=mx.get_peak_memory() / BYTES_PER_GB,
        )

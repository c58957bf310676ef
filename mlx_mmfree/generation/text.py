"""Text generation: a prompt in, text out, whole or as a stream, or several at once."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from ..arguments import check_list, check_model, check_tokenizer, check_whole, checks_names
from ..models import Decoder
from ..platform.resident_memory import BYTES_PER_GB
from . import decode, speculative
from .answers.completion import Completion, FinishReason, end_tokens
from .prompts import Prompt, prompt_tokens
from .reader import PREFILL_STEP_SIZE, Progress
from .sampling import LogitsProcessor, Sampler, greedy
from .scheduling import Event, Request, Scheduler
from .speculative import NgramDecoding, RepeatedText
from .wired_memory import while_wired

_SAMPLING = (
    *("temp", "temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _checks_sampling(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Names the right argument to a caller who gives a sampler's, or a number for a sampler."""

    @wraps(function)
    def reported(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name in kwargs:
            if name in _SAMPLING:
                own = {"temperature": "temp"}.get(name, name)
                is_choice = _SAMPLING.index(name) < _SAMPLING.index("repetition_penalty")
                way = f"sampler=make_sampler({own}=...)"
                raise TypeError(
                    f"[{function.__name__}] '{name}' must be given as "
                    f"{way if is_choice else f'processors=make_processors({own}=...)'} but came alone."
                )
        if "seed" in kwargs:
            raise TypeError(
                f"[{function.__name__}] 'seed' must be set before, by mx.random.seed(...), but came as "
                "an argument."
            )
        if not callable(sampler := kwargs.get("sampler", greedy)):
            raise TypeError(
                f"[{function.__name__}] 'sampler' must be a function, such as make_sampler(temp=0.7), "
                f"but got {sampler!r:.80}."
            )
        return function(*args, **kwargs)

    return reported


def _check(
    model: Any,
    tokenizer: Any,
    *,
    processors: Any,
    stop: Any,
    extra_eos_tokens: Any,
    prefill_step_size: Any,
    draft_model: Any = None,
) -> None:
    """Refuses arguments of other types.

    Raises:
        TypeError: There is one.
    """
    check_model("generate", model, tokenizer)
    check_tokenizer("generate", tokenizer)
    if draft_model is not None:
        check_model("generate", draft_model, name="draft_model")
    is_list = isinstance(processors, Collection) and not callable(processors)
    if not is_list or not all(hasattr(each, "start") for each in processors):
        raise TypeError(
            "[generate] 'processors' must be a list, such as make_processors(repetition_penalty=1.1), "
            f"but got {processors!r:.80}."
        )
    if not isinstance(stop, str):
        check_list("generate", "stop", stop, "texts")
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"[generate] 'stop' must hold texts but holds {text!r:.80}.")
    check_list("generate", "extra_eos_tokens", extra_eos_tokens, "tokens")
    check_whole("generate", prefill_step_size=prefill_step_size)


@_checks_sampling
@checks_names
def stream_generate(
    model: Decoder,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_tokens: int = 100,
    sampler: Sampler = greedy,
    processors: Sequence[LogitsProcessor] = (),
    stop: Sequence[str] = (),
    extra_eos_tokens: Collection[int | str] = (),
    state: Any = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    draft_model: Decoder | None = None,
    num_draft_tokens: int = speculative.NUM_DRAFT_TOKENS,
    prompt_progress_callback: Progress | None = None,
    is_answer: bool = False,
    ngram_drafts: bool = False,
) -> Iterator[decode.GenerationResponse]:
    """Continues a prompt and yields the text as it comes.

    On Metal, the memory of the model stays resident from the first step to the last.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        prompt: A text, or its ids as they are.
        max_tokens: How many tokens to generate at most.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`.
        stop: Strings that end the text and are not shown.
        extra_eos_tokens: Ids or texts of tokens that end the text beside the tokenizer's own.
        state: What the model has read before the prompt.
        prefill_step_size: Positions of the prompt read at a time.
        draft_model: A smaller model with the same tokens, which proposes what the model then only
            checks; it changes the speed but, save for rounding, not the text or its distribution.
        num_draft_tokens: How many tokens are proposed at a time.
        prompt_progress_callback: Takes how many tokens of the prompt are read, and how many there are.
        is_answer: Whether the text is an answer to the prompt, a text of its own, and does not go on
            from its last word. With SentencePiece, a space before its first word is then left out.
        ngram_drafts: Propose what followed the same tokens earlier in the text, without a draft model.
            The text is, save for rounding, the same, sampled or not; edits come faster.

    Returns:
        An iterator over the steps, each computed when it is asked for.

    Raises:
        ValueError: The prompt is empty or not in the vocabulary, an option is out of its bounds, the
            draft model has another vocabulary, or both kinds of drafts are asked for.
        TypeError: An argument is misspelt or of another type.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> for response in stream_generate(model, tokenizer, "Once upon a time", max_tokens=8):
        ...     print(response.text, end="", flush=True)
        , there was a little girl named Lily
    """
    _check(
        model,
        tokenizer,
        processors=processors,
        stop=stop,
        extra_eos_tokens=extra_eos_tokens,
        prefill_step_size=prefill_step_size,
        draft_model=draft_model,
    )
    speculative.check_num_draft_tokens(num_draft_tokens)
    if state is not None:
        model.check_state(state, 1)
    decode.check_max_tokens(max_tokens)
    ids = prompt_tokens(tokenizer, prompt, model.vocab_size, most=model.max_length)
    after = () if is_answer else ids
    end = end_tokens(tokenizer, extra_eos_tokens)
    completion = Completion(tokenizer, stop, end, max_tokens, after)
    start = perf_counter()
    tokens = mx.array([ids], mx.int32)
    options: dict[str, Any] = {
        "state": state,
        "sampler": sampler,
        "processors": processors,
        "known": tokenizer.vocab_size,
        "prefill_step_size": prefill_step_size,
        "progress": prompt_progress_callback,
    }
    drafts: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "max_tokens": max_tokens,
        "end": end,
    }
    decoding: decode.Decoding | speculative.Speculation
    if draft_model is not None:
        speculative.check_one_kind_of_draft(draft_model, ngram_drafts)
        decoding = speculative.SpeculativeDecoding(model, draft_model, tokens, **options, **drafts)
    elif ngram_drafts:
        decoding = NgramDecoding(model, tokens, RepeatedText(ids), **options, **drafts)
    else:
        decoding = decode.Decoding(model, tokens, **options)
    steps = decode.responses(decoding, completion, len(ids), start)
    return while_wired(steps, model, draft_model)


@_checks_sampling
@checks_names
def generate(
    model: Decoder,
    tokenizer: Any,
    prompt: Prompt,
    *,
    max_tokens: int = 100,
    sampler: Sampler = greedy,
    processors: Sequence[LogitsProcessor] = (),
    stop: Sequence[str] = (),
    extra_eos_tokens: Collection[int | str] = (),
    state: Any = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    draft_model: Decoder | None = None,
    num_draft_tokens: int = speculative.NUM_DRAFT_TOKENS,
    prompt_progress_callback: Progress | None = None,
    is_answer: bool = False,
    ngram_drafts: bool = False,
    verbose: bool = False,
) -> str:
    """Continues a prompt and returns the new text.

    Args:
        model: Gives the logits.
        tokenizer: Belongs to the model.
        prompt: A text, or its ids as they are.
        max_tokens: How many tokens to generate at most.
        sampler: Chooses tokens from logits; see `make_sampler`.
        processors: Change the logits before; see `make_processors`.
        stop: Strings that end the text and are not shown.
        extra_eos_tokens: Ids or texts of tokens that end the text beside the tokenizer's own.
        state: What the model has read before the prompt.
        prefill_step_size: Positions of the prompt read at a time.
        draft_model: A smaller model with the same tokens, which proposes what the model then only
            checks; it changes the speed but, save for rounding, not the text or its distribution.
        num_draft_tokens: How many tokens are proposed at a time.
        prompt_progress_callback: Takes how many tokens of the prompt are read, and how many there are.
        is_answer: Whether the text is an answer to the prompt, a text of its own, and does not go on
            from its last word. With SentencePiece, a space before its first word is then left out.
        ngram_drafts: Propose what followed the same tokens earlier in the text, without a draft model.
            The text is, save for rounding, the same, sampled or not; edits come faster.
        verbose: Print the text as it comes, then tokens, speeds and peak memory.

    Returns:
        The new text, without the prompt.

    Raises:
        ValueError: The prompt is empty or not in the vocabulary, an option is out of its bounds, the
            draft model has another vocabulary, or both kinds of drafts are asked for.
        TypeError: An argument is misspelt or of another type.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> generate(model, tokenizer, "Once upon a time", max_tokens=8)
        ', there was a little girl named Lily'
    """
    parts = []
    rule = "=" * 10
    responses = stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        sampler=sampler,
        processors=processors,
        stop=stop,
        extra_eos_tokens=extra_eos_tokens,
        state=state,
        prefill_step_size=prefill_step_size,
        draft_model=draft_model,
        num_draft_tokens=num_draft_tokens,
        prompt_progress_callback=prompt_progress_callback,
        is_answer=is_answer,
        ngram_drafts=ngram_drafts,
    )
    if verbose:
        print(rule)
    for response in responses:
        parts.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{rule}", *statistics_lines(response), sep="\n")
    return "".join(parts)


def statistics_lines(statistics: "decode.GenerationResponse | BatchStats") -> list[str]:
    """The speed of reading and writing, as lines for people."""
    return [
        _speed_line("Prompt", statistics.prompt_tokens, statistics.prompt_tps),
        _speed_line("Generation", statistics.generation_tokens, statistics.generation_tps),
        f"Peak memory: {statistics.peak_memory:.3f} GB",
    ]


def _speed_line(part: str, count: int, rate: float) -> str:
    """A count with its speed, which a single generated token does not have."""
    line = f"{part}: {count} {'token' if count == 1 else 'tokens'}"
    return f"{line}, {rate:.3f} tokens-per-sec" if rate else line


BatchProgress = Callable[[int, int], bool]


@dataclass(frozen=True)
class BatchStats:
    """The time and memory of a batch.

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


@_checks_sampling
@checks_names
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

    Prompts of similar length are read together, padded on the left. A text that is finished makes space
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
        is_answer: Whether the texts are answers to the prompts, texts of their own, and do not go on
            from their last words. With SentencePiece, a space before the first word is then left out.

    Returns:
        The texts in the order of the prompts, and what the batch took.

    Raises:
        ValueError: A prompt is empty or not in the vocabulary, or an option is out of its bounds.
        TypeError: An argument is misspelt or of another type.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> batch_generate(model, tokenizer, ["Once upon a time", "One day"], max_tokens=4).texts
        [', there was a', ', she went to']
    """
    _check(
        model,
        tokenizer,
        processors=processors,
        stop=stop,
        extra_eos_tokens=extra_eos_tokens,
        prefill_step_size=prefill_step_size,
    )
    decode.check_max_tokens(max_tokens)
    check_whole("batch_generate", batch_size=batch_size)
    if batch_size < 1:
        raise ValueError(f"[batch_generate] 'batch_size' must be at least 1 but got {batch_size}.")
    check_list("batch_generate", "prompts", prompts, "prompts")
    rows = [
        prompt_tokens(tokenizer, prompt, model.vocab_size, most=model.max_length)
        for prompt in prompts
    ]
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


def rate(count: int, time_s: float) -> float:
    """How many per second; 0 where nothing was timed."""
    return count / time_s if count and time_s > 0 else 0.0


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
    """Separates the time of the prompts from the time of the texts."""

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
        """The measurements, for so many tokens read and written."""
        return BatchStats(
            prompt_tokens=read,
            prompt_tps=rate(read, self._prompt_time),
            prompt_time=self._prompt_time,
            generation_tokens=written,
            generation_tps=rate(self._generated, self._generation_time),
            generation_time=self._generation_time,
            peak_memory=mx.get_peak_memory() / BYTES_PER_GB,
        )

"""Text generation: a prompt in, text out, whole or as a stream."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..models import Decoder
from ..models.parts.tokens import token_array
from ..platform.units import BYTES_PER_GB
from .completion import Completion, FinishReason
from .decode import PREFILL_STEP_SIZE, Decoding, Progress, check_max_tokens
from .known_tokens import with_known_tokens
from .penalties import LogitsProcessor
from .prompt_ids import Prompt, prompt_tokens
from .samplers import Sampler, greedy
from .speculative import NUM_DRAFT_TOKENS, DraftStats, SpeculativeDecoding
from .stop import end_tokens

if TYPE_CHECKING:
    from .batch import BatchStats


@dataclass(frozen=True)
class GenerationResponse:
    """One step of a stream.

    Attributes:
        text: The text that this step adds, possibly none.
        token: The token that was chosen.
        prompt_tokens: Number of tokens of the prompt.
        prompt_tps: Tokens of the prompt read per second.
        generation_tokens: Number of tokens generated so far.
        generation_tps: Tokens generated per second after the first.
        peak_memory: The most memory that MLX has used, in GB.
        finish_reason: `"stop"` at a stop string or the end of the text, `"length"` at the last
            token allowed, otherwise `None`.
        from_draft: Whether the draft model proposed the token.
        draft: What the draft model proposed so far; `None` without one.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> *_, last = stream_generate(model, tokenizer, "Once upon a time", max_tokens=4)
        >>> last.generation_tokens, last.finish_reason
        (4, 'length')
    """

    text: str
    token: int
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None = None
    from_draft: bool = False
    draft: DraftStats | None = None


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
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    prompt_progress_callback: Progress | None = None,
    is_answer: bool = False,
) -> Iterator[GenerationResponse]:
    """Continues a prompt and yields the text as it comes.

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
        num_draft_tokens: How many tokens it proposes at a time.
        prompt_progress_callback: Takes how many tokens of the prompt are read, and how many there are.
        is_answer: Whether the text is an answer to the prompt, a text of its own, and does not go on
            from its last word. With SentencePiece, a space before its first word is then left out.

    Returns:
        An iterator over the steps, each computed when it is asked for.

    Raises:
        ValueError: The prompt is empty or not in the vocabulary, an option is out of its bounds, or
            the draft model has another vocabulary.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> for response in stream_generate(model, tokenizer, "Once upon a time", max_tokens=8):
        ...     print(response.text, end="", flush=True)
        , there was a little girl named Lily
    """
    check_max_tokens(max_tokens)
    ids = prompt_tokens(tokenizer, prompt, model.vocab_size)
    after = () if is_answer else ids
    end = end_tokens(tokenizer, extra_eos_tokens)
    completion = Completion(tokenizer, stop, end, max_tokens, after)
    start = perf_counter()
    tokens = token_array(ids, model.vocab_size)
    options: dict[str, Any] = {
        "state": state,
        "sampler": sampler,
        "processors": with_known_tokens(model, tokenizer, processors),
        "prefill_step_size": prefill_step_size,
        "progress": prompt_progress_callback,
    }
    decoding: Decoding | SpeculativeDecoding
    if draft_model is None:
        decoding = Decoding(model, tokens, **options)
    else:
        decoding = SpeculativeDecoding(
            model, draft_model, tokens, num_draft_tokens=num_draft_tokens, **options
        )
    return responses(decoding, completion, len(ids), start)


def responses(
    decoding: Decoding | SpeculativeDecoding, completion: Completion, prompt_size: int, start: float
) -> Iterator[GenerationResponse]:
    """Decodes to the end of a text and yields its steps; `start` is when reading it began."""
    prompt_tps, first = 0.0, start
    while completion.finish_reason is None:
        (token,) = decoding.step(is_last=completion.remaining == 1)
        now = perf_counter()
        if not completion.tokens:
            prompt_tps, first = prompt_size / (now - start), now
        text = completion.add(token)
        count = len(completion.tokens)
        yield GenerationResponse(
            text=text,
            token=token,
            prompt_tokens=prompt_size,
            prompt_tps=prompt_tps,
            generation_tokens=count,
            generation_tps=rate(count - 1, now - first),
            peak_memory=mx.get_peak_memory() / BYTES_PER_GB,
            finish_reason=completion.finish_reason,
            from_draft=isinstance(decoding, SpeculativeDecoding) and decoding.from_draft,
            draft=decoding.stats if isinstance(decoding, SpeculativeDecoding) else None,
        )


def rate(count: int, time_s: float) -> float:
    """How many per second; 0 where nothing was timed."""
    return count / time_s if count and time_s > 0 else 0.0


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
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    prompt_progress_callback: Progress | None = None,
    is_answer: bool = False,
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
        draft_model, num_draft_tokens, prompt_progress_callback, is_answer: As for `stream_generate`.
        verbose: Print the text as it comes, then tokens, speeds and peak memory.

    Returns:
        The new text, without the prompt.

    Raises:
        ValueError: As `stream_generate`.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> generate(model, tokenizer, "Once upon a time", max_tokens=8)
        ', there was a little girl named Lily'
    """
    parts = []
    rule = "=" * 10
    if verbose:
        print(rule)
    for response in stream_generate(
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
    ):
        parts.append(response.text)
        if verbose:
            print(response.text, end="", flush=True)
    if verbose:
        print(f"\n{rule}", *statistics_lines(response), sep="\n")
    return "".join(parts)


def statistics_lines(statistics: "GenerationResponse | BatchStats") -> list[str]:
    """What was read and written how fast, as lines for people."""
    return [
        _speed_line("Prompt", statistics.prompt_tokens, statistics.prompt_tps),
        _speed_line("Generation", statistics.generation_tokens, statistics.generation_tps),
        f"Peak memory: {statistics.peak_memory:.3f} GB",
    ]


def _speed_line(part: str, count: int, rate: float) -> str:
    """A count with its speed, which a single generated token does not have."""
    line = f"{part}: {count} {'token' if count == 1 else 'tokens'}"
    return f"{line}, {rate:.3f} tokens-per-sec" if rate else line

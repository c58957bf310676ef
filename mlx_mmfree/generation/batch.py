"""Text generation for several prompts at once."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from ..models import Decoder
from ..platform.units import BYTES_PER_GB
from .completion import Completion, FinishReason
from .decode import PREFILL_STEP_SIZE, Decoding, check_max_tokens
from .known_tokens import with_known_tokens
from .penalties import LogitsProcessor
from .prompt_ids import Prompt, prompt_tokens
from .samplers import Sampler, greedy
from .stop import end_tokens
from .text import rate

BatchProgress = Callable[[int, int], bool]


@dataclass(frozen=True)
class BatchStats:
    """What a batch took.

    Attributes:
        prompt_tokens: Tokens of all prompts.
        prompt_tps: Tokens of the prompts read per second.
        prompt_time: Seconds until each group of prompts had its first tokens.
        generation_tokens: Tokens generated.
        generation_tps: Tokens generated per second after the first of each prompt.
        generation_time: Seconds for those.
        peak_memory: The most memory that MLX has used, in GB.
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
    """

    texts: list[str]
    tokens: list[list[int]]
    prompt_tokens: list[int]
    finish_reasons: list[FinishReason | None]
    stats: BatchStats


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array | None]:
    """Several sequences as one batch, the shorter ones padded on the left.

    Args:
        rows: The ids of each sequence, checked before and at least one each.

    Returns:
        Tokens, `int32` `(B, L)`, and booleans `(B, L)` that are `False` where padded; `None` where
        all are equally long.
    """
    length = max(map(len, rows))
    padding = np.array([length - len(row) for row in rows])
    tokens = np.zeros((len(rows), length), np.int32)
    for row, ids, missing in zip(tokens, rows, padding, strict=True):
        row[missing:] = ids
    valid = np.arange(length) >= padding[:, None]
    return mx.array(tokens), mx.array(valid) if padding.any() else None


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
) -> BatchResponse:
    """Continues several prompts, up to `batch_size` of them together.

    Prompts of similar length are read together, padded on the left; a row that is finished leaves
    the batch.

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

    Raises:
        ValueError: A prompt is empty or not in the vocabulary, or an option is out of its bounds.
    """
    check_max_tokens(max_tokens)
    if batch_size < 1:
        raise ValueError(f"[batch_generate] 'batch_size' must be at least 1 but got {batch_size}.")
    rows = [prompt_tokens(tokenizer, prompt, model.vocab_size) for prompt in prompts]
    end = end_tokens(tokenizer, extra_eos_tokens)
    completions = [Completion(tokenizer, stop, end, max_tokens) for _ in rows]
    processors = with_known_tokens(model, tokenizer, processors)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    prompt_time = generation_time = 0.0
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        start = perf_counter()
        tokens, valid = left_padded([rows[index] for index in group])
        decoding = Decoding(
            model,
            tokens,
            valid=valid,
            sampler=sampler,
            processors=processors,
            prefill_step_size=prefill_step_size,
        )
        started = 0.0
        goes_on = True
        for _ in _steps(decoding, [completions[index] for index in group]):
            started = started or perf_counter()
            done = sum(row.finish_reason is not None for row in completions)
            goes_on = progress is None or progress(done, len(rows))
            if not goes_on:
                break
        prompt_time += started - start
        generation_time += perf_counter() - started
        if not goes_on:
            break
    begun = [index for index, row in enumerate(completions) if row.tokens]
    read = sum(len(rows[index]) for index in begun)
    written = sum(len(row.tokens) for row in completions)
    return BatchResponse(
        texts=[completion.text for completion in completions],
        tokens=[completion.tokens for completion in completions],
        prompt_tokens=[len(row) for row in rows],
        finish_reasons=[completion.finish_reason for completion in completions],
        stats=BatchStats(
            prompt_tokens=read,
            prompt_tps=rate(read, prompt_time),
            prompt_time=prompt_time,
            generation_tokens=written,
            generation_tps=rate(written - len(begun), generation_time),
            generation_time=generation_time,
            peak_memory=mx.get_peak_memory() / BYTES_PER_GB,
        ),
    )


def _steps(decoding: Decoding, completions: Sequence[Completion]) -> Iterator[None]:
    """Decodes until every row is finished and yields after each step."""
    active = list(completions)
    while active:
        tokens = decoding.step(is_last=all(row.remaining == 1 for row in active))
        for row, token in zip(active, tokens, strict=True):
            row.add(token)
        going = [n for n, row in enumerate(active) if row.finish_reason is None]
        if 0 < len(going) < len(active):
            decoding.keep(going)
        active = [active[n] for n in going]
        yield

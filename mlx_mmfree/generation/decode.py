"""Decoding step by step: the ids of a prompt in, tokens and their text out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, cast

import mlx.core as mx

from ..arguments import check_whole
from ..models import Decoder
from ..models.parts.token_checks import token_array
from ..ops.device import on_cpu
from ..platform.resident_memory import BYTES_PER_GB
from .answers.completion import Completion, FinishReason
from .finite_logits import not_finite
from .reader import PREFILL_STEP_SIZE, Progress, Reader, State, prefill
from .sampling import LogitsProcessor, Sampler, greedy

STEPS_PER_CACHE_CLEARING = 256


@dataclass(frozen=True)
class DraftStats:
    """The value of drafts.

    Attributes:
        proposed: Tokens that were proposed.
        accepted: Those that the model kept.

    Example:
        >>> DraftStats(proposed=8, accepted=6).acceptance_rate
        0.75
    """

    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The share that was kept; 0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0


class Decoding:
    """A batch in the middle of decoding: while one step's tokens are read, the next is computed.

    Args:
        model: Gives the logits.
        tokens: The prompts, integers `(B, L)`.
        state: The state before the prompts.
        sampler: Chooses tokens from logits.
        processors: Change the logits before.
        known: As for `Reader`.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as the prompt is read.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
    """

    from_draft = False
    stats: DraftStats | None = None

    def __init__(
        self,
        model: Decoder,
        tokens: mx.array,
        *,
        state: State = None,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        known: int | None = None,
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
    ):
        self._sampler = sampler
        self._processors = processors
        self._steps = 0
        self._finite: mx.array
        self._is_on_cpu = on_cpu()
        read = prefill(model, tokens[:, :-1], state, step_size=prefill_step_size, progress=progress)
        self._reader = Reader(model, read, known)
        # memory that nothing else holds is written in place
        del read
        self._seen = [p.start(tokens, None, model.vocab_size) for p in processors]
        # the dtype that samplers choose in, so that the same graph reads on
        self._tokens = tokens[:, -1].astype(mx.uint32)
        self._start()

    @property
    def state(self) -> State:
        """The tokens read so far: the prompt and the tokens of all steps, save one with `is_last`."""
        return self._reader.state

    def _start(self) -> None:
        """Starts to compute the tokens that follow, and the state after the present ones."""
        before = self._reader.arrays
        logits, self._finite = self._reader.read(self._tokens)
        for process, seen in zip(self._processors, self._seen, strict=True):
            logits = process(logits, seen)
        self._tokens = self._sampler(logits)
        self._seen = [
            process.update(seen, self._tokens)
            for process, seen in zip(self._processors, self._seen, strict=True)
        ]
        results = [self._tokens, self._finite, self._seen]
        if self._is_on_cpu:
            # its memory is written to in place once nothing is to compute it any more
            mx.eval(before)
        del before
        if self._is_on_cpu:
            # apart, so that the state can be waited for while the logits are computed: whatever is
            # started together is held until all of it is there
            mx.async_eval(self._reader.arrays)
            mx.async_eval(results)
        else:
            mx.async_eval(results, self._reader.arrays)

    def step(self, *, is_last: bool = False) -> list[int]:
        """The next token of each row.

        Args:
            is_last: No step follows, so none is started.

        Raises:
            NumericalError: The logits that the tokens were chosen from are not finite.
        """
        tokens, finite = self._tokens, self._finite
        if not is_last:
            self._start()
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        if not all(finite.tolist()):  # type: ignore[arg-type]
            raise not_finite()
        return cast(list[int], tokens.tolist())


def generate_tokens(
    model: Decoder,
    tokens: Sequence[int],
    *,
    state: State = None,
    sampler: Sampler = greedy,
    processors: Sequence[LogitsProcessor] = (),
    max_tokens: int = 100,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> Iterator[int]:
    """Continues a sequence of tokens; nothing but `max_tokens` or the caller ends it.

    Args:
        model: Gives the logits.
        tokens: The prompt's ids, at least one.
        state: What the model has read before the prompt, as `prefill` returns it.
        sampler: Chooses tokens from logits.
        processors: Change the logits before.
        max_tokens: How many tokens to generate.
        prefill_step_size: Positions of the prompt read at a time.

    Returns:
        An iterator over the new ids, each computed when it is asked for.

    Raises:
        ValueError: The prompt is empty, a token is not in the vocabulary, or a number is too small.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> tokens = generate_tokens(model, tokenizer.encode("Once upon a time"), max_tokens=4)
        >>> tokenizer.decode(list(tokens))
        ', there was a'
    """
    check_max_tokens(max_tokens)
    decoding = Decoding(
        model,
        token_array(tokens, model.vocab_size),
        state=state,
        sampler=sampler,
        processors=processors,
        prefill_step_size=prefill_step_size,
    )
    return (decoding.step(is_last=n == max_tokens)[0] for n in range(1, max_tokens + 1))


def check_max_tokens(max_tokens: object) -> None:
    # A stream ends when its count equals the bound, which a fraction never does.
    check_whole("generate", max_tokens=max_tokens)
    if cast(int, max_tokens) < 1:
        raise ValueError(f"[generate] 'max_tokens' must be at least 1 but got {max_tokens}.")


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
        from_draft: Whether the token was proposed, by a draft model or by the text.
        draft: The value of the drafts so far; `None` without them.

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


class _Steps(Protocol):
    """The interface of decoding: `Decoding`, alone or with drafts."""

    @property
    def from_draft(self) -> bool:
        """True if the last token was proposed."""

    @property
    def stats(self) -> DraftStats | None:
        """The value of the drafts so far; `None` without them."""

    def step(self, *, is_last: bool = False) -> list[int]:
        """The next token of each row."""


def responses(
    decoding: _Steps, completion: Completion, prompt_size: int, start: float
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
            generation_tps=(count - 1) / (now - first) if now > first else 0.0,
            peak_memory=mx.get_peak_memory() / BYTES_PER_GB,
            finish_reason=completion.finish_reason,
            from_draft=decoding.from_draft,
            draft=decoding.stats,
        )

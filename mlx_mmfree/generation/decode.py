"""The decoding loop: token ids in, token ids out."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import mlx.core as mx

from ..models import Decoder, check_causal
from ..models.parts.tokens import token_array
from .finite import check_finite
from .penalties import LogitsProcessor
from .reader import Reader, State
from .samplers import Sampler, greedy

Progress = Callable[[int, int], None]
"""Takes how many positions of a prompt are read, and how many there are."""

PREFILL_STEP_SIZE = 2048
STEPS_PER_CACHE_CLEARING = 256


def prefill(
    model: Decoder,
    tokens: mx.array,
    state: State = None,
    *,
    step_size: int = PREFILL_STEP_SIZE,
    progress: Progress | None = None,
) -> State:
    """Reads tokens in chunks and returns the state after them; no logits are computed.

    Args:
        model: Reads the tokens.
        tokens: Integers `(B, L)`.
        state: The state before them; `None` is that of an empty text.
        step_size: Positions a chunk.
        progress: Called before the first chunk and after each.

    Returns:
        The state, a tuple with that of each token mixer.

    Raises:
        ValueError: The step size is not positive.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> tokens = tokenizer.encode("Once upon a time")
        >>> state = prefill(model, mx.array([tokens[:-1]]))
        >>> tokenizer.decode(list(generate_tokens(model, tokens[-1:], state=state, max_tokens=4)))
        ', there was a'
    """
    if step_size < 1:
        raise ValueError(f"[prefill] 'prefill_step_size' must be at least 1 but got {step_size}.")
    length = tokens.shape[1]
    # MLX's slices are 32 bits wide
    step_size = min(step_size, max(length, 1))
    if progress is not None:
        progress(0, length)
    for first in range(0, length, step_size):
        _, state = model.hidden(tokens[:, first : first + step_size], state)
        mx.eval(state)
        mx.clear_cache()
        if progress is not None:
            progress(min(first + step_size, length), length)
    return state


class Decoding:
    """A batch in the middle of decoding: while one step's tokens are read, the next is computed.

    Args:
        model: Gives the logits.
        tokens: The prompts, integers `(B, L)`.
        state: The state before the prompts.
        sampler: Chooses tokens from logits.
        processors: Change the logits before.
        prefill_step_size: Positions of the prompt read at a time.
        progress: Called as the prompt is read.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
    """

    def __init__(
        self,
        model: Decoder,
        tokens: mx.array,
        *,
        state: State = None,
        sampler: Sampler = greedy,
        processors: Sequence[LogitsProcessor] = (),
        prefill_step_size: int = PREFILL_STEP_SIZE,
        progress: Progress | None = None,
    ):
        check_causal(model)
        self._sampler = sampler
        self._processors = processors
        self._steps = 0
        self._finite: mx.array
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
        state = model.init_state(tokens.shape[0]) if state is None else state
        read = prefill(model, tokens[:, :-1], state, step_size=prefill_step_size, progress=progress)
        self._reader = Reader(model, read)
        # memory that nothing else holds is written in place
        del read
        self._seen = [p.start(tokens, None, model.vocab_size) for p in processors]
        # the dtype that samplers choose in, so that the same graph reads on
        self._tokens = self._queue(tokens[:, -1].astype(mx.uint32))
        self._start()

    @property
    def state(self) -> State:
        """What the model has read: the prompt and the tokens of all steps, save one with `is_last`."""
        return self._reader.state

    def _queue(self, tokens: mx.array) -> mx.array:
        """The tokens that follow `tokens` `(B,)`, and the state after these, yet to be computed."""
        logits, self._finite = self._reader.read(tokens)
        for process, seen in zip(self._processors, self._seen, strict=True):
            logits = process(logits, seen)
        chosen = self._sampler(logits)
        self._seen = [
            process.update(seen, chosen)
            for process, seen in zip(self._processors, self._seen, strict=True)
        ]
        return chosen

    def _start(self) -> None:
        results = [self._tokens, self._finite, self._seen]
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
            before = self._reader.arrays
            self._tokens = self._queue(tokens)
            if self._is_on_cpu:
                # its memory is written to in place once nothing is to compute it any more
                mx.eval(before)
            del before
            self._start()
        self._steps += 1
        if self._steps % STEPS_PER_CACHE_CLEARING == 0:
            mx.clear_cache()
        check_finite(finite)
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


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"[generate] 'max_tokens' must be at least 1 but got {max_tokens}.")

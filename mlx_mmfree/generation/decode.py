"""The decoding loop: the ids of a prompt in, tokens and their text out."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, ClassVar, Literal, Protocol, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import NumericalError
from ..models import Decoder, check_causal
from ..models.parts.stack import check_tokens, token_array
from ..ops import long_sum
from ..ops.backend.compilation import can_compile, compiled, joined
from ..platform.resident_memory import BYTES_PER_GB
from .sampling import LogitsProcessor, Sampler, greedy

Prompt = str | Sequence[int]


def prompt_tokens(
    tokenizer: Any, prompt: Prompt, vocab_size: int, parse_special: bool | None = None
) -> list[int]:
    """The ids of a prompt. The first token of a text comes once, though a chat template may spell it.

    Args:
        tokenizer: Encodes a text, with the special tokens that the model expects.
        prompt: A text or ids.
        vocab_size: Every id is below it.
        parse_special: As for `Tokenizer.encode`.

    Raises:
        ValueError: The prompt is empty, no Unicode text, or has a token outside the vocabulary.
    """
    ids: Sequence[Any] = prompt
    if isinstance(prompt, str) and prompt:
        ids = tokenizer.encode(prompt, parse_special=parse_special)
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            ids = ids[1:]
    if len(ids) == 0:
        raise ValueError("[generate] 'prompt' must not be empty. Give at least one word or token.")
    # the tokenizer's own are whole numbers, of which the largest tells
    if not isinstance(prompt, str) or max(ids) >= vocab_size:
        check_tokens(ids, vocab_size)
    return [int(token) for token in ids]


def are_finite(logits: mx.array) -> mx.array:
    """Whether no logit of a row is infinite or NaN and not all are zero: booleans `(...)`, not computed.

    A norm turns numbers whose squares overflow into zeros, which is why zeros are refused too. Each
    row's sum of magnitudes tells both in one pass, which costs next to nothing beside a decoding step.
    """
    sums = long_sum(mx.abs(logits), axis=-1)
    return mx.logical_and(sums > 0, sums < mx.inf)


def check_finite(finite: mx.array) -> None:
    """Raises `NumericalError` unless all that `are_finite` found was finite."""
    if not all(cast(list[bool], finite.tolist())):
        raise not_finite()


def not_finite() -> NumericalError:
    """The error where logits are not finite."""
    return NumericalError(
        "[model] the model's logits must be finite but hold NaN or infinity, or are all zero "
        "because a number before them overflowed. The weights, the adapter or the prompt cache are "
        "damaged, or the float type is too small: try '--dtype float32'."
    )


State = Any
Shapes = tuple[tuple[int, ...], ...]
Step = Callable[..., Any]

_MOST_SHAPES = 4


def fixed_state(
    model: Decoder, state: tuple[Any, ...], count: int = 1
) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """The state in a form whose shapes stay while tokens are read, and with room for `count`.

    Returns:
        The state, and for each mixer the number of tokens after which it must grow, `None` for never;
        or the same state and `()` where a mixer has no such form.
    """
    kinds = [mixer.state_kind for mixer in model.token_mixers]
    fixed = []
    for kind, old in zip(kinds, state, strict=True):
        pair = kind.fixed(old, count)
        if pair is None:
            return state, ()
        fixed.append(pair)
    return tuple(new for new, _ in fixed), tuple(room for _, room in fixed)


class Reader:
    """Reads tokens and gives the logits after them.

    The state takes a form whose shapes stay, where the model has one. MLX then repeats the graph that
    was built in Python for the first tokens of a shape, until the room for keys and values grows.

    Args:
        model: Gives the logits.
        state: What it has read of each row.
        known: How many tokens have a text, of an embedding that may be larger than the tokenizer's
            vocabulary; the logits of the others are minus infinity. `None`: all.

    Attributes:
        arrays: The state as it is, for MLX to compute.
    """

    # the model takes tokens `(B, L)`, and those to read lack this axis
    _axis: ClassVar[int] = 1

    def __init__(self, model: Decoder, state: State, known: int | None = None):
        self._model = model
        self._known = known
        self._block_arguments = model.block_arguments()
        mx.eval(self._block_arguments)
        self._can_compile = can_compile()
        self._steps: dict[Shapes, Step] = {}
        self.go_on(state)

    @property
    def state(self) -> State:
        """The model's state, in the ordinary form, which any number of tokens may follow."""
        if not self._rooms:
            return self.arrays
        return tuple(
            mixer.state_kind.growing(state, None if room is None else room - self._size)
            for mixer, state, room in zip(
                self._model.token_mixers, self.arrays, self._rooms, strict=True
            )
        )

    def go_on(self, state: State, count: int = 1) -> None:
        """Goes on with these rows; the graphs for numbers of rows are kept.

        Args:
            state: That of the rows, in the ordinary form.
            count: How many tokens it must have room for.
        """
        self._size = 0
        self._rooms: tuple[int | None, ...] = ()
        self.arrays = state
        if self._can_compile:
            self.arrays, self._rooms = fixed_state(self._model, state, count)
        self._room = min((room for room in self._rooms if room is not None), default=inf)
        flat: list[tuple[str, mx.array]] = tree_flatten(self.arrays)  # type: ignore[assignment]
        shapes = tuple(array.shape[1:] for _, array in flat)
        # what reads tokens into a state of these shapes; it builds a graph for each number of rows
        step = self._steps.pop(shapes, None)
        if step is None:
            arguments = self._model, self._block_arguments, self._known, self._axis
            step = partial(_read, *arguments)
            step = compiled(step) if self._rooms else step
        self._step = self._steps[shapes] = step
        if len(self._steps) > _MOST_SHAPES:
            # graphs of the shapes that were used longest ago
            del self._steps[next(iter(self._steps))]

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        if self._size >= self._room:
            self.go_on(self.state)
        logits, finite, self.arrays = self._step(tokens, self.arrays)
        self._size += 1
        return logits, finite


def _read(
    model: Decoder,
    block_arguments: list[dict[str, mx.array]],
    known: int | None,
    axis: int,
    tokens: mx.array,
    state: State,
) -> tuple[mx.array, mx.array, State]:
    """One token of each row, `(B,)` with axis 1, or several of one, `(L,)` with axis 0."""
    tokens = mx.expand_dims(tokens, axis)
    new = model.hidden(tokens, state, block_arguments=block_arguments, by_position=axis == 0)
    # not with the head, so that the state can be waited for while the logits are computed
    hidden, state = joined(new, (tokens, state))
    logits = model.logits(hidden).squeeze(axis).astype(mx.float32)
    finite = are_finite(logits)
    if known is not None and known < logits.shape[1]:
        logits = mx.where(mx.arange(logits.shape[1]) < known, logits, -mx.inf)
    return logits, finite, state


class TextEnd(Protocol):
    """Ends a text amid a token, or after one.

    Attributes:
        met: The stop string that has ended the text, if one has.
        is_met: Whether the text has ended.
        holds_back: Whether there is text that more text decides on.
    """

    @property
    def met(self) -> str | None: ...
    @property
    def is_met(self) -> bool: ...
    @property
    def holds_back(self) -> bool: ...

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""

    def finalize(self) -> str:
        """The text held back, once no more follows."""


class StopStrings:
    """Ends a text before the first of some strings; no part of it is ever shown.

    Text that could be the beginning of a stop string is held back until more text decides.

    Args:
        strings: The stop strings; none is empty.

    Attributes:
        met: The one that has ended the text; `None` where none has.

    Raises:
        ValueError: A string is empty.

    Example:
        >>> stop = StopStrings(["END"])
        >>> stop.add("the E"), stop.add("ND of it"), stop.is_met
        ('the ', '', True)
    """

    def __init__(self, strings: Sequence[str] = ()):
        if isinstance(strings, str):
            strings = [strings]
        if "" in strings:
            raise ValueError("[StopStrings] 'stop' must not hold an empty string.")
        self._strings = tuple(strings)
        self._held = ""
        self.met: str | None = None

    @property
    def is_met(self) -> bool:
        """Whether one of the strings has ended the text."""
        return self.met is not None

    def add(self, text: str) -> str:
        """Takes new text and returns what may be shown."""
        text = self._held + text
        found = [(start + len(s), start, s) for s in self._strings if (start := text.find(s)) >= 0]
        if found:
            # The one that is complete first, so that it does not matter how the text is cut.
            _, start, self.met = min(found)
            self._held = ""
            return text[:start]
        cut = len(text) - max((overlap(text, s) for s in self._strings), default=0)
        self._held = text[cut:]
        return text[:cut]

    @property
    def holds_back(self) -> bool:
        """Whether there is text that more text decides on."""
        return bool(self._held)

    def finalize(self) -> str:
        """The text held back, once no more follows."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, string: str) -> int:
    """The length of the longest proper beginning of `string` that `text` ends with."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)


def end_tokens(tokenizer: Any, extra: Collection[int | str] = ()) -> frozenset[int]:
    """The ids that end a text: the tokenizer's own and the extra ones.

    Args:
        tokenizer: Knows its `eos_token_ids`.
        extra: Ids, or tokens by their name in the vocabulary or their text, such as `"<|im_end|>"`.

    Raises:
        ValueError: A text is not exactly one token.
    """
    return frozenset(tokenizer.eos_token_ids) | {_token_id(tokenizer, token) for token in extra}


def _token_id(tokenizer: Any, token: int | str) -> int:
    if isinstance(token, int):
        return token
    if token.isdecimal():
        return int(token)
    named: int | None = tokenizer.token_id(token)
    if named is not None:
        return named
    # within a text, and at its beginning
    inside: list[int] = tokenizer.encode_continuation(token, parse_special=True)
    ids: list[int] = tokenizer.encode(token, add_special_tokens=False, parse_special=True)
    for found in (inside, ids):
        if len(found) == 1:
            return found[0]
    raise ValueError(
        f"[generate] 'extra_eos_token' must be an id or one token of the vocabulary but got "
        f"{token!r}, which is {len(ids)} tokens."
    )


FinishReason = Literal["stop", "length"]


class Completion:
    """The text of one prompt as it grows.

    Args:
        tokenizer: Turns tokens into text.
        stop: Strings that end the text, or what ends it otherwise.
        end: Tokens that end the text.
        max_tokens: How many tokens there may be.
        after: The ids of the prompt whose text this one goes on; none, if it begins anew.

    Attributes:
        tokens: Those so far.
        remaining: How many may follow.
        finish_reason: Why the text has ended; `None` where it has not.
        stop_string: The stop string that has ended it, if one has.
        is_cut: Whether the last tokens are a stop string, or may be the beginning of one.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] | TextEnd,
        end: Collection[int],
        max_tokens: int,
        after: Collection[int] = (),
    ):
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.is_cut = False
        self._detokenizer = tokenizer.detokenizer(after=after)
        self._stop: TextEnd | None = None
        if not isinstance(stop, Sequence):
            self._stop = stop
        elif len(stop) or isinstance(stop, str):
            self._stop = StopStrings(stop)
        self._end = end
        self.remaining = max_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> str:
        """Takes a token and returns the text that it adds."""
        self.tokens.append(token)
        self.remaining -= 1
        if token in self._end:
            self.finish_reason = "stop"
            text = self._detokenizer.finalize()
        else:
            text = self._detokenizer.add(token)
            if not self.remaining:
                self.finish_reason = "length"
                text += self._detokenizer.finalize()
        if self._stop is not None:
            text = self._stop.add(text)
            self.stop_string = self._stop.met
            if self._stop.is_met:
                self.finish_reason = "stop"
            elif self.finish_reason:
                text += self._stop.finalize()
            self.is_cut = self._stop.met is not None or self._stop.holds_back
        self._parts.append(text)
        return text


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
        state: The state before them; `None` is an empty text's.
        step_size: Positions a chunk.
        progress: Called before the first chunk and after each.

    Returns:
        The state, a tuple with each token mixer's.

    Raises:
        UnsupportedModelError: The model cannot continue a text.
        ValueError: The step size is not positive.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> tokens = tokenizer.encode("Once upon a time")
        >>> state = prefill(model, mx.array([tokens[:-1]]))
        >>> tokenizer.decode(list(generate_tokens(model, tokens[-1:], state=state, max_tokens=4)))
        ', there was a'
    """
    check_causal(model)
    if step_size < 1:
        raise ValueError(f"[prefill] 'prefill_step_size' must be at least 1 but got {step_size}.")
    batch, length = tokens.shape
    if not length and state is None:
        return model.init_state(batch)
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
        self._is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
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


def check_max_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
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
        """Whether the last token was proposed."""

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

"""A model reads tokens: a prompt in chunks, then one step at a time, which MLX can repeat."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ..layers.states import TAIL_SLOTS
from ..models import Decoder, check_causal
from ..ops.device import can_compile, compiled, fused, runs_metal_kernels
from .finite_logits import are_finite

State = Any
Shapes = tuple[tuple[int, ...], ...]
Step = Callable[..., Any]
Progress = Callable[[int, int], None]
"""Takes how many positions of a prompt are read, and how many there are."""

PREFILL_STEP_SIZE = 2048
_MOST_SHAPES = 4


def fixed_state(
    model: Decoder, state: tuple[Any, ...], count: int = 1
) -> tuple[tuple[Any, ...], tuple[int | None, ...]]:
    """The state in a format whose shapes stay while tokens are read, and with capacity for `count`.

    Returns:
        The state, and for each mixer the number of tokens after which it must grow, `None` for never;
        or the same state and `()` where a mixer has no such format.
    """
    kinds = [mixer.state_kind for mixer in model.token_mixers]
    fixed = []
    for kind, old in zip(kinds, state, strict=True):
        pair = kind.fixed(old, count)
        if pair is None:
            return state, ()
        fixed.append(pair)
    return tuple(new for new, _ in fixed), tuple(capacity for _, capacity in fixed)


def with_tails(model: Decoder, state: tuple[Any, ...], slots: int) -> tuple[Any, ...]:
    """A `fixed_state` whose next tokens, at most so many, go into tails."""
    pairs = zip(model.token_mixers, state, strict=True)
    return tuple(mixer.state_kind.with_tail(each, slots) for mixer, each in pairs)


class Reader:
    """Reads tokens and gives the logits after them.

    The state takes a format whose shapes stay, where the model has one. MLX then repeats the graph that
    was built in Python for the first tokens of a shape, until the space for keys and values grows. On
    Metal, where a step is started while the one before is computed, the last tokens are in a tail.

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
        self._takes_tails = runs_metal_kernels()
        self._steps: dict[Shapes, Step] = {}
        self.go_on(state)

    @property
    def state(self) -> State:
        """The model's state, in the ordinary variant, which any number of tokens may follow."""
        if not self._capacities:
            return self.arrays
        found = []
        for mixer, state, capacity in zip(
            self._model.token_mixers, self.arrays, self._capacities, strict=True
        ):
            kind, unread = mixer.state_kind, None if capacity is None else capacity - self._size
            found.append(kind.growing(kind.without_tail(state, self._size), unread))
        return tuple(found)

    def go_on(self, state: State, count: int = 1) -> None:
        """Goes on with these rows; the graphs for numbers of rows stay cached.

        Args:
            state: The state of the rows, in the ordinary variant.
            count: How many tokens it must have space for.
        """
        self._size = 0
        self._capacities: tuple[int | None, ...] = ()
        self.arrays = state
        if self._can_compile:
            self.arrays, self._capacities = fixed_state(self._model, state, count)
        self._capacity = min(
            (capacity for capacity in self._capacities if capacity is not None), default=inf
        )
        self._has_tails = False
        if self._capacities and self._takes_tails:
            slots = max(TAIL_SLOTS, count)
            fixed, self.arrays = self.arrays, with_tails(self._model, self.arrays, slots)
            pairs = zip(fixed, self.arrays, strict=True)
            self._has_tails = any(old is not new for old, new in pairs)
            self._capacity = min(self._capacity, slots) if self._has_tails else self._capacity
        flat: list[tuple[str, mx.array]] = tree_flatten(self.arrays)  # type: ignore[assignment]
        shapes = tuple(array.shape[1:] for _, array in flat)
        # what reads tokens into a state of these shapes; it builds a graph for each number of rows
        step = self._steps.pop(shapes, None)
        if step is None:
            arguments = self._model, self._block_arguments, self._known, self._axis
            step = partial(_read, *arguments)
            step = compiled(step) if self._capacities else step
        self._step = self._steps[shapes] = step
        if len(self._steps) > _MOST_SHAPES:
            # graphs of the shapes that were used longest ago
            del self._steps[next(iter(self._steps))]

    def make_capacity(self, count: int) -> None:
        """Makes space for so many tokens, and writes the tails' into the buffers."""
        if self._has_tails:
            # in place, as soon as no kernel reads the buffers any more
            mx.eval(self.arrays)
            mx.synchronize()
        self.go_on(self.state, count)

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        if self._size >= self._capacity:
            self.make_capacity(1)
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
    hidden, state = fused(new, (tokens, state))
    logits = model.logits(hidden).squeeze(axis).astype(mx.float32)
    finite = are_finite(logits)
    if known is not None and known < logits.shape[1]:
        logits = mx.where(mx.arange(logits.shape[1]) < known, logits, -mx.inf)
    return logits, finite, state


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

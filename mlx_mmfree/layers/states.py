"""The states of mixers: how they are stored, and how tokens are decoded with them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

State = Any
"""A tree of arrays, each with the batch on axis 0; `()` where a mixer carries nothing."""


def check_state(caller: str, own: State, given: State, *, is_fixed: bool = False) -> None:
    """Refuses a state of another kind of mixer, or one of other sizes.

    Args:
        caller: The caller that the error names.
        own: A state of the mixer.
        given: The other one.
        is_fixed: Whether states of the mixer keep their sizes.

    Raises:
        TypeError: It is of another kind.
        ValueError: It has other sizes.
    """
    kinds = type(own), type(given)
    # the formats of one state, such as keys in few bits, are defined together
    if kinds[0] is not kinds[1] and (
        kinds[0].__module__ != kinds[1].__module__ or kinds[0].__module__ in _PLAIN
    ):
        raise TypeError(
            f"[{caller}] 'state' must be one that it returned before, of {kinds[0].__name__}, but got "
            f"{kinds[1].__name__}. Begin with state=None."
        )
    flat: list[Any] = [tree_flatten(own), tree_flatten(given)]
    sizes = [[array.shape for _, array in each] for each in flat]
    texts, others = ({shape[0] for shape in each if shape} for each in sizes)
    if texts and others and texts.isdisjoint(others):
        raise ValueError(
            f"[{caller}] 'state' must be of as many texts as this batch has, {max(texts)}, but is of "
            f"{max(others)}. Begin with state=None."
        )
    if is_fixed and sizes[0] != sizes[1]:
        raise ValueError(
            f"[{caller}] 'state' must have the shapes {sizes[0]} of this batch but has {sizes[1]}. "
            "Begin with state=None."
        )


_PLAIN = ("builtins", "mlx.core")


class StatesByPosition(NamedTuple):
    """The state of a mixer after each token of a call, where it cannot take tokens back.

    Attributes:
        states: One state for each position, first to last.
    """

    states: tuple[State, ...]


class StoredStates:
    """How states are stored and merged: what batches, prompt caches and the estimate of memory ask.

    The defaults serve plain arrays whose sizes stay, as a recurrence carries them.
    """

    _init_state: Callable[[int, mx.Dtype], State]

    @property
    def settings(self) -> str:
        """The arguments of the mixer that its states depend on, beside their shapes and its weights."""
        return ""

    def blank(self, batch_size: int, length: int, dtype: mx.Dtype) -> State:
        """A state of the shapes and dtypes that `length` tokens leave, unpadded.

        What `counted` finds in it is what the tokens would leave; the rest is zeros.
        """
        return self._init_state(batch_size, dtype)

    @property
    def exact_length(self) -> int | None:
        """The most tokens of a row whose state is exact; after them it is quantised. `None`: all."""
        return None

    def is_of_batch(self, state: State, length: int) -> bool:
        """Returns whether a row of `length` tokens would have another state if read alone."""
        return False

    def counted(self, state: State) -> tuple[mx.array, ...]:
        """The arrays of a state that depend on the number of tokens alone."""
        return ()

    def merged(self, states: Sequence[State]) -> State:
        """The rows of several states, one after the other; each goes on as it would alone.

        Args:
            states: In the ordinary variant, one at least. Their rows may have read different texts.
        """
        return tree_map(lambda *arrays: mx.concatenate(list(arrays)), *states)

    def selected(self, state: State, rows: mx.array, length: int) -> State:
        """Some rows of a state, in the order given.

        Args:
            state: In the ordinary variant.
            rows: Numbers of rows, integers `(N,)`; one may be named several times.
            length: How many tokens the longest of these rows has read.
        """
        return tree_map(lambda array: array[rows], state)


TAIL_SLOTS = 64
"""The number of tokens after which a tail is written into the cache. A step writes so many rows for each
layer, which is 1.6 % of what attention reads of 4,096, and waits for the one before once in so many."""

HELD_TAILS = 3
"""The tails of a layer that are in memory at once: what a step reads and writes, and what the next one
writes, which is started meanwhile."""


class DecodedStates:
    """How tokens are decoded: what draft models and the compiled step ask.

    The defaults serve plain arrays whose sizes stay, as a recurrence carries them.

    Attributes:
        takes_steps: Whether `attention_step` computes what the layer does with a single token.
    """

    _is_fixed: bool = False
    takes_steps: bool = False

    def can_rewind(self, state: State, count: int) -> bool:
        """Returns whether `rewound` restores the present state after up to `count` more tokens."""
        return False

    def rewound(self, state: State, count: int) -> State:
        """The state before its last `count` tokens, where `can_rewind` promised it."""
        raise NotImplementedError

    @property
    def is_renewed(self) -> bool:
        """True if each token makes the whole state anew, so that the one before may stay as it is."""
        return self._is_fixed

    def fixed(self, state: State, count: int = 1) -> tuple[State, int | None] | None:
        """The state in a format whose shapes stay while tokens are read.

        Args:
            state: In the ordinary variant.
            count: The least number of tokens that there shall be capacity for.

        Returns:
            The state and the number of tokens that it has space for, `None` for any; or `None` where
            there is no such format.
        """
        return (state, None) if self._is_fixed else None

    def growing(self, state: State, unread: int | None) -> State:
        """The ordinary variant of a `fixed` state, without its last `unread` tokens."""
        return state

    def unpacked(self, state: Any, array: Callable[..., mx.array], after: int) -> State:
        """The state of which another format is stored, which has the shapes of its arrays.

        Args:
            state: Something with a `shape` in the place of each array.
            array: Makes the array of it; with a number, so many slots of it on axis 2.
            after: How many of its last tokens `rewound` takes back.
        """
        return tree_map(array, state)


class TailedStates:
    """States whose last tokens lie in a tail, so that a GPU need not copy what it still reads.

    The defaults serve states for which a tail spares nothing.
    """

    def with_tail(self, state: State, slots: int) -> State:
        """The `fixed` state, whose next tokens go into a tail of so many slots."""
        return state

    def without_tail(self, state: State, count: int) -> State:
        """The `fixed` state with the `count` tokens of the tail in it."""
        return state


class StateKind(StoredStates, DecodedStates, TailedStates):
    """The states of one mixer; one whose state grows with the text returns a kind of its own.

    Args:
        init_state: That of the mixer.
        is_fixed: Whether the shapes stay while tokens are read.
    """

    def __init__(self, init_state: Callable[[int, mx.Dtype], State], *, is_fixed: bool):
        self._init_state = init_state
        self._is_fixed = is_fixed

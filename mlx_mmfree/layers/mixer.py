"""The interfaces that mixers follow, and what they declare of themselves."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..ops.backend.dispatch import FLOATS
from .arguments import check_features, check_sequences
from .attention.options import Quantization
from .context import Context
from .linear import LinearFactory as LinearFactory
from .linear import Linears as Linears
from .linear import apply_norm
from .linear import factory_of as factory_of

Group = mx.distributed.Group


class Partition(NamedTuple):
    """The parts of a mixer of which each process holds an equal share: some heads, or some channels.

    A projection divided by its outputs needs no word from the others; the one after it is divided by
    its inputs, and its results are added up (Shoeybi et al., arXiv 1909.08053).

    Attributes:
        columns: The projections that are divided by their outputs, and of how many equal sections each
            consists: 2 where it holds gate and up one after the other.
        rows: The projection that is divided by its inputs.
        norm: An RMSNorm over all of the divided channels.
        counts: Attributes that count heads or channels.
        arrays: Attributes with a row for each head or channel.
    """

    columns: Mapping[str, int]
    rows: str = "output_proj"
    norm: str | None = None
    counts: tuple[str, ...] = ("num_heads",)
    arrays: tuple[str, ...] = ()


QUERIES_KEYS_VALUES = {"query_proj": 1, "key_proj": 1, "value_proj": 1}


def own_share(count: int, group: Group) -> slice:
    """Which of so many things this process holds."""
    size = count // group.size()
    return slice(group.rank() * size, (group.rank() + 1) * size)


def part_of(array: mx.array, group: Group, sections: int = 1, axis: int = 0) -> mx.array:
    """This process' share of each section of an axis, as an array of its own."""
    rows = mx.arange(array.shape[axis]).reshape(sections, group.size(), -1)[:, group.rank()]
    return mx.take(array, rows.flatten(), axis=axis)


State = Any
"""A tree of arrays, each with the batch on axis 0; `()` where a mixer carries nothing."""


class StatesByPosition(NamedTuple):
    """The state of a mixer after each token of a call, where it cannot take tokens back.

    Attributes:
        states: One state for each position, first to last.
    """

    states: tuple[State, ...]


class StateKind:
    """The states of one mixer.

    The defaults serve plain arrays whose sizes stay, as a recurrence carries them. A mixer whose
    state grows with the text returns a kind of its own.

    Args:
        init_state: That of the mixer.
        is_fixed: Whether the shapes stay while tokens are read.

    Attributes:
        takes_steps: Whether `attention_step` computes what the layer does with a single token.
    """

    _is_fixed: bool = False
    takes_steps: bool = False

    def __init__(self, init_state: Callable[[int, mx.Dtype], State], *, is_fixed: bool):
        self._init_state = init_state
        self._is_fixed = is_fixed

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
        """Whether a row of `length` tokens would have another state if it had been read alone."""
        return False

    def counted(self, state: State) -> tuple[mx.array, ...]:
        """The arrays of a state that depend on the number of tokens alone."""
        return ()

    def can_rewind(self, state: State, count: int) -> bool:
        """Whether `rewound` gives back what the state is now once up to `count` tokens are added."""
        return False

    def rewound(self, state: State, count: int) -> State:
        """The state before its last `count` tokens, where `can_rewind` promised it."""
        raise NotImplementedError

    def unpacked(self, state: Any, array: Callable[..., mx.array], after: int) -> State:
        """The state of which another form is held, which has the shapes of its arrays.

        Args:
            state: Something with a `shape` in the place of each array.
            array: Makes the array of it; with a number, so many slots of it on axis 2.
            after: How many of its last tokens `rewound` takes back.
        """
        return tree_map(array, state)

    @property
    def is_renewed(self) -> bool:
        """Whether each token makes the whole state anew, so that the one before may be held as it is."""
        return self._is_fixed

    def fixed(self, state: State, count: int = 1) -> tuple[State, int | None] | None:
        """The state in a form whose shapes stay while tokens are read.

        Args:
            state: In the ordinary form.
            count: The least number of tokens that there shall be room for.

        Returns:
            The state and the number of tokens that it has room for, `None` for any; or `None` where
            there is no such form.
        """
        return (state, None) if self._is_fixed else None

    def growing(self, state: State, unread: int | None) -> State:
        """The ordinary form of a `fixed` state after `unread` tokens fewer than it had room for."""
        return state

    def joined(self, states: Sequence[State]) -> State:
        """The rows of several states, one after the other; each goes on as it would alone.

        Args:
            states: In the ordinary form, one at least. Their rows may have read different texts.
        """
        return tree_map(lambda *arrays: mx.concatenate(list(arrays)), *states)

    def selected(self, state: State, rows: mx.array, length: int) -> State:
        """Some rows of a state, in the order given.

        Args:
            state: In the ordinary form.
            rows: Numbers of rows, integers `(N,)`; one may be named several times.
            length: How many tokens the longest of these rows has read.
        """
        return tree_map(lambda array: array[rows], state)


class TokenMixer(nn.Module):
    """A module that mixes along the sequence.

    `mixer(x, state, valid)` maps `x` of shape `(B, L, D)` to `y` of the same shape and the state after
    the last position. Feeding a sequence whole, in pieces or token by token gives the same result, but
    for rounding. A subclass writes `init_state` and `mix`.
    The state is returned, never kept or changed in place. Positions where `valid`, booleans `(B, L)`,
    is `False` are padding and change nothing. Where `starts`, booleans `(B, L)`, is `True` and the
    position is no padding, a new sample begins in the row: nothing before it is seen from there on,
    and the result, the gradient and the state returned are as for that sample alone.

    A mixer is made as `Mixer(dims, *, ..., linear=nn.Linear)`, with `is_causal` and `max_length` only
    where they mean something. What its kind can do is declared:

    Attributes:
        name: What a description of a model calls it; `""`: the name of its file.
        equation: What it computes, in a line.
        complexity: Multiplications for a sequence of `T` positions of `D` dims.
        paper: Where it was published.
        causal: It can be built so that output t depends on inputs up to t only.
        bidirectional: It can be built to see the whole sequence.
        cross: It takes a second sequence, as `memory=` and `memory_valid=`.
        recurrent: Its state has a constant size.
        length_bound: It is made with `max_length=` and takes no longer sequence.
        packs_samples: It takes `starts`.
        fuses: `mix` takes `norm` and `residual`, and answers itself where the context asks by position.
        weighs_channels: `mixing_weights` has weights of each channel instead of each head.
        key_value_dims: Numbers of one key of those that its state holds; `None`: it holds none.
        partition: How it is divided between processes; `None`: it cannot be, or has no weights.
        shared_inputs: Names of its linears that read the same input, in the order in which it asks for
            them, where it says so.
    """

    name: ClassVar[str] = ""
    equation: ClassVar[str] = ""
    complexity: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    causal: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    cross: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    length_bound: ClassVar[bool] = False
    packs_samples: ClassVar[bool] = False
    fuses: ClassVar[bool] = False
    weighs_channels: ClassVar[bool] = False
    key_value_dims: int | None = None
    partition: Partition | None = None
    _dims: int = 0

    is_causal: bool = False
    """Whether output t of this one depends on inputs up to t only."""

    def __init_subclass__(cls) -> None:
        cls.is_causal = cls.causal

    def with_state(
        self,
        *,
        max_size: int | None = None,
        quantization: Quantization | None = None,
        quantization_start: int = 0,
    ) -> "TokenMixer":
        """The same mixer, with the same weights, whose state keeps less of a text, where it can.

        Args:
            max_size: The most tokens of which it holds keys and values.
            quantization: Stores them in few bits.
            quantization_start: The state stays exact until it holds so many tokens.
        """
        return self

    def score_count(self, batch_size: int, queries: int, length: int, context_length: int) -> int:
        """About the most numbers that weights between tokens take while a text is read.

        Args:
            batch_size: Texts at a time.
            queries: Positions whose weights are alive at once.
            length: Positions read at a time.
            context_length: The longest text.
        """
        return 0

    def take_part(self, group: Group) -> None:
        """Called before it is divided as `partition` says, for what cannot be said there."""

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        """The state before the first position."""
        raise NotImplementedError

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """How much of each position's values the result of each position holds, to be looked at.

        Times the values of a head, they are what the mixer computes before its output's gates, norms
        and projection. Recurrences give the weights of their unrolled form.

        Args:
            x: A sequence from its beginning, without padding, `(B, L, D)`.
            arguments: Those of `__call__` that decide what is seen, such as `memory` or a lower bound.

        Returns:
            `(B, H, L, N)`, for heads or for channels.

        Raises:
            ValueError: The mixer has no such weights.
        """
        raise ValueError(
            f"[{type(self).__name__}] has no weights between positions that could be shown."
        )

    @property
    def state_kind(self) -> StateKind:
        """The operations on its states."""
        return StateKind(self.init_state, is_fixed=self.recurrent)

    def __call__(
        self,
        x: mx.array,
        state: State = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        memory: Any = None,
        memory_valid: mx.array | None = None,
        context: Context | None = None,
        norm: nn.Module | None = None,
        residual: mx.array | None = None,
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        """The one call of every mixer: `residual + mixer(norm(x))`, and the state after it.

        Args:
            x: The sequence, or the residual stream before its norm, `(B, L, D)`.
            state: The state before; `None`: the state of an empty text.
            valid: Booleans `(B, L)`, `False` where padded.
            starts: Booleans `(B, L)`, `True` where another sample begins in the row.
            memory: A second sequence.
            memory_valid: Booleans `(B, M)`, `False` where that one is padded.
            context: The call of a model, which holds the four before and what its blocks share.
            norm: Applied to `x`; `None`: there is none.
            residual: Added to the result; `None`: nothing is.
            arguments: What a model makes for this block, such as a lower bound.

        Returns:
            `(B, L, D)` and the new state; where the context asks by position, `StatesByPosition`, or
            the new state if `can_rewind` of its kind says that the tokens can be taken back from it.

        Raises:
            TypeError: The mixer does not take what is given, or `x` holds no floats.
            ValueError: `x` has another shape than `(B, L, D)`.
        """
        if context is None:
            self._check_takes(starts, memory)
            context = Context(valid, starts=starts, memory=memory, memory_valid=memory_valid)
        dims = self._dims
        if dims and (x.ndim != 3 or x.shape[2] != dims or x.dtype not in FLOATS):
            check_sequences(type(self).__name__, x, dims)
        if state is None:
            state = self.init_state(x.shape[0], x.dtype)
        if self.fuses:
            return self.mix(x, state, context, norm=norm, residual=residual, **arguments)
        x = x if norm is None else apply_norm(norm, x)
        if context.by_position and not self.state_kind.can_rewind(state, x.shape[1]):
            y, state = one_by_one(partial(self.mix, **arguments), x, state, context)
        else:
            y, state = self.mix(x, state, context, **arguments)
        return y if residual is None else residual + y, state

    mix: Callable[..., tuple[mx.array, State]]
    """The mixer itself: `mix(x, state, context, **arguments)` gives `(B, L, D)` and the new state,
    for the checked input and a state. One that `fuses` is given `norm` and `residual` by name too."""

    def _check_takes(self, starts: mx.array | None, memory: Any) -> None:
        """Refuses what a mixer of another kind is called with."""
        for name, given, takes in (
            ("starts", starts, self.packs_samples),
            ("memory", memory, self.cross),
        ):
            if given is not None and not takes:
                raise TypeError(
                    f"[{type(self).__name__}] '{name}' must be left out, since the mixer does not take "
                    "it. mmfree mixers lists those that do."
                )


def one_by_one(
    mix: Callable[[mx.array, State, Context], tuple[mx.array, State]],
    x: mx.array,
    state: State,
    context: Context,
) -> tuple[mx.array, StatesByPosition]:
    """The result of `mix` for each position after those before it, and the state after each."""
    parts, states = [], []
    calls = [context.at(n) for n in range(x.shape[1])]
    for n, call in enumerate(calls):
        y, state = mix(x[:, n : n + 1], state, call)
        parts.append(y)
        states.append(state)
    context.take_handed(calls)
    return mx.concatenate(parts, axis=1), StatesByPosition(tuple(states))


class ChannelMixer(nn.Module):
    """A module that mixes within each position; a subclass computes it in `mix`.

    One that looks back, as RWKV's does, is a `TokenMixer`, which a block takes in its place.

    Attributes:
        name: What a description of a model calls it; `""`: the name of its file.
        partition: How it is divided between processes; `None`: it cannot be.
        shared_inputs: As of a `TokenMixer`.
        adds_branch: Whether a block leaves to it, where its first projection is rotated, the sum of
            the residual stream and the branch before it: a mixer whose first launch adds.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> class Doubling(ChannelMixer):
        ...     def mix(self, x):
        ...         return 2 * x
        >>> Doubling()(mx.ones((1, 2)), residual=mx.ones((1, 2))).tolist()
        [[3.0, 3.0]]
    """

    name: ClassVar[str] = ""
    adds_branch: ClassVar[bool] = False
    partition: Partition | None = None

    def take_part(self, group: Group) -> None:
        """As in `TokenMixer`."""

    def mix(self, x: mx.array) -> mx.array:
        """The result of the mixer, `(..., D)`."""
        raise NotImplementedError

    def of_sum(self, x: mx.array, branch: mx.array, norm: nn.Module | None) -> mx.array:
        """`u + mixer(norm(u))`, where `u` is the sum of both."""
        x = x + branch
        return self(x, norm=norm, residual=x)

    def __call__(
        self, x: mx.array, *, norm: nn.Module | None = None, residual: mx.array | None = None
    ) -> mx.array:
        """`residual + mixer(norm(x))`; a mixer overrides it to compute all of it together.

        Args:
            x: `(..., D)`.
            norm: Applied to `x`; `None`: there is none.
            residual: Added to the result; `None`: nothing is.
        """
        y = self.mix(x if norm is None else norm(x))
        return y if residual is None else residual + y


class SpatialMixer(nn.Module):
    """A module that mixes the places of a map: maps `(B, H, W, D)` to the same shape.

    It is made as `Mixer(dims, *, ..., linear=nn.Linear)` and takes maps of any height and width.

    Attributes:
        name: What a description of a model calls it; `""`: the name of its file.
        equation: What it computes, in a line.
        complexity: Multiplications for a map of `T` places of `D` dims.
        paper: Where it was published.
    """

    equation: ClassVar[str] = ""
    complexity: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __call__(self, x: mx.array) -> mx.array:
        raise NotImplementedError


def check_map(place: str, x: mx.array, dims: int) -> None:
    """Refuses an input of a spatial mixer that is no map of `dims` floats with at least one place.

    Raises:
        TypeError: It holds no floats.
        ValueError: It has another number of axes, another size, or no places.
    """
    if x.ndim != 4:
        way_out = " Add a batch axis: x[None]." if x.ndim == 3 else ""
        raise ValueError(
            f"[{place}] 'x' must have the four axes (batch, height, width, dims) but got shape "
            f"{x.shape}.{way_out}"
        )
    check_features(place, x, dims)
    if 0 in x.shape[1:3]:
        raise ValueError(f"[{place}] 'x' must have at least one place but got shape {x.shape}.")

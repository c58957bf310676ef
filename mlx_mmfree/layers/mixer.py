"""The interfaces that mixers follow, and what they declare of themselves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from .arguments import check_features
from .attention.options import Quantization
from .context import Context

LinearFactory = Callable[..., nn.Module]
"""Makes a projection: called as `linear(input_dims, output_dims, bias=...)`."""

Linears = LinearFactory | Mapping[str, LinearFactory]
"""Makes all projections of a mixer, or each by its name."""


def factory_of(linears: Linears, name: str) -> LinearFactory:
    """What makes the projection of this name."""
    return linears[name] if isinstance(linears, Mapping) else linears


Group = mx.distributed.Group


class Partition(NamedTuple):
    """The parts of a mixer of which each process holds an equal share: some heads, or some channels.

    A projection divided by its outputs needs no word from the others; the one behind it is divided by
    its inputs, and its results are added up (Shoeybi et al., arXiv 1909.08053).

    Attributes:
        columns: The projections that are divided by their outputs, and of how many equal sections each
            consists: 2 where it holds gate and up one behind the other.
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
    """What a mixer carried after each token of a call, where it cannot take tokens back.

    Attributes:
        states: One state for each position, first to last.
    """

    states: tuple[State, ...]


class StateKind:
    """The states of one mixer.

    The defaults are those of plain arrays whose sizes stay, as a recurrence carries them. A mixer whose
    state grows with the text returns a kind of its own.

    Args:
        init_state: That of the mixer.
        is_fixed: Whether the shapes stay while tokens are read.
    """

    def __init__(self, init_state: Callable[[int, mx.Dtype], State], *, is_fixed: bool):
        self._init_state = init_state
        self._is_fixed = is_fixed

    @property
    def settings(self) -> str:
        """What of the mixer's arguments its states depend on, beside their shapes and its weights."""
        return ""

    def blank(self, batch_size: int, length: int, dtype: mx.Dtype) -> State:
        """A state of the shapes and dtypes that `length` tokens leave, unpadded.

        What `counted` finds in it is what the tokens would leave; the rest is zeros.
        """
        return self._init_state(batch_size, dtype)

    @property
    def exact_length(self) -> int | None:
        """The most tokens of a row whose state is exact; behind them it is quantised. `None`: all."""
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
        """The rows of several states, one behind the other; each goes on as it would alone.

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
    for rounding.
    The state is returned, never kept or changed in place. Positions where `valid`, booleans `(B, L)`,
    is `False` are padding and change nothing. Where `starts`, booleans `(B, L)`, is `True` and the
    position is no padding, a new sample begins in the row: nothing before it is seen from there on,
    and the result, the gradient and the state returned are those of that sample alone.

    A mixer is made as `Mixer(dims, *, ..., linear=nn.Linear)`, with `is_causal` and `max_length` only
    where they mean something. What its kind can do is declared:

    Attributes:
        equation: What it computes, in a line.
        complexity: Multiplications for a sequence of `T` positions of `D` dims.
        paper: Where it was published.
        causal: It can be built so that output t depends on inputs up to t only.
        bidirectional: It can be built to see the whole sequence.
        cross: `__call__` takes a second sequence as `memory=` and `memory_valid=`.
        recurrent: Its state has a constant size.
        length_bound: It is made with `max_length=` and takes no longer sequence.
        packs_samples: `__call__` takes `starts`.
        weighs_channels: `mixing_weights` has weights of each channel instead of each head.
        key_value_dims: Numbers of one key of those that its state holds; `None`: it holds none.
        partition: How it is divided between processes; `None`: it cannot be, or has no weights.
    """

    equation: ClassVar[str] = ""
    complexity: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    causal: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    cross: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    length_bound: ClassVar[bool] = False
    packs_samples: ClassVar[bool] = False
    weighs_channels: ClassVar[bool] = False
    key_value_dims: int | None = None
    partition: Partition | None = None
    _is_causal: bool | None = None

    @property
    def is_causal(self) -> bool:
        """Whether output t of this one depends on inputs up to t only."""
        return self.causal if self._is_causal is None else self._is_causal

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
        and projection. Recurrences give those of their unrolled form.

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
        """What can be done with its states."""
        return StateKind(self.init_state, is_fixed=self.recurrent)

    __call__: Callable[..., tuple[mx.array, State]]
    """`mixer(x, state, valid)`, and by name what its kind takes beside: `starts`, `memory` and
    `memory_valid`, or arguments that its model makes for each block."""

    def residual(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: State,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        """`x + mixer(norm(x))`, or `x + mixer(x)` without a norm, and the state; for a block of a model.

        A mixer overrides it to compute norm and sum together with its projections, or to share with
        other blocks what `context` makes once.

        Args:
            x: The residual stream, `(B, L, D)`.
            norm: The norm before the mixer; `None`: there is none.
            state: The state before.
            context: The tokens of the call.
            arguments: What the model makes for this block, such as a lower bound.
        """
        if self.packs_samples and context.starts is not None:
            arguments["starts"] = context.starts
        if self.cross and context.memory is not None:
            arguments |= {"memory": context.memory, "memory_valid": context.memory_valid}
        y, state = self(x if norm is None else norm(x), state, context.valid, **arguments)
        return x + y, state

    def residual_by_position(
        self,
        x: mx.array,
        norm: nn.Module | None,
        state: State,
        context: Context,
        **arguments: Any,
    ) -> tuple[mx.array, State | StatesByPosition]:
        """As `residual`, for a caller that may take the last tokens back.

        A mixer overrides it to project all tokens together even so.

        Returns:
            `(B, L, D)`, and the state after each token; or only the last one where `can_rewind` of its
            kind says that the tokens can be taken back from it.
        """
        if self.state_kind.can_rewind(state, x.shape[1]):
            return self.residual(x, norm, state, context, **arguments)

        def step(one: mx.array, state: State, context: Context) -> tuple[mx.array, State]:
            return self.residual(one, norm, state, context, **arguments)

        return one_by_one(step, x, state, context)


def one_by_one(
    step: Callable[[mx.array, State, Context], tuple[mx.array, State]],
    x: mx.array,
    state: State,
    context: Context,
) -> tuple[mx.array, StatesByPosition]:
    """What `step` makes of each position after those before it, and the state after each."""
    parts, states = [], []
    for n in range(x.shape[1]):
        y, state = step(x[:, n : n + 1], state, context.at(n))
        parts.append(y)
        states.append(state)
    return mx.concatenate(parts, axis=1), StatesByPosition(tuple(states))


class ChannelMixer(nn.Module):
    """A module that mixes within each position; a subclass computes it in `__call__`.

    Attributes:
        partition: How it is divided between processes; `None`: it cannot be.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> class Doubling(ChannelMixer):
        ...     def __call__(self, x):
        ...         return 2 * x
        >>> Doubling().residual(mx.ones((1, 2)), norm=None).tolist()
        [[3.0, 3.0]]
    """

    partition: Partition | None = None

    def __call__(self, x: mx.array) -> mx.array:
        raise NotImplementedError

    def take_part(self, group: Group) -> None:
        """As that of a `TokenMixer`."""

    def residual(self, x: mx.array, norm: nn.Module | None) -> mx.array:
        """`x + mixer(norm(x))`, or `x + mixer(x)` without a norm.

        A mixer overrides it to compute norm and sum together with its projections.
        """
        return x + self(x if norm is None else norm(x))


class SpatialMixer(nn.Module):
    """A module that mixes the places of a map: maps `(B, H, W, D)` to the same shape.

    It is made as `Mixer(dims, *, ..., linear=nn.Linear)` and takes maps of any height and width.

    Attributes:
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

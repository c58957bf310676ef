"""The interfaces that mixers follow, and what they declare of themselves."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..arguments import check_known, checks_layer
from ..ops.activations import Activation
from ..ops.device import FLOATS
from .arguments import boolean_masks, check_features, check_sequences
from .context import Context
from .fusing import Parts, finished, fuses, inputs, widths_of
from .linear import LinearFactory as LinearFactory
from .linear import Linears as Linears
from .linear import factory_of as factory_of
from .quantization import Quantization
from .states import State as State
from .states import StateKind as StateKind
from .states import StatesByPosition as StatesByPosition
from .states import check_state as check_state

Widths = Sequence[int]
"""The widths of what one projection gives, which lie one after the other."""

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


class Mixer(nn.Module):
    r"""Base class of mixers: equations between two layers of projections.

    .. math::
        y = W_o\,\mathrm{mix}(W_1 x, \ldots, W_n x)

    A mixer makes its linears with `make_projections` and `make_output`, and writes `mix`, which takes
    the results of the first in their order and returns what the last one reads. Without
    `make_projections`, `mix` takes `x` itself; without `make_output`, it returns the result.

    Attributes:
        projections: The linears of the input by their names, each with the widths of its results.
        output: The name of the linear of the result; `""`: there is none.
        before_output: The name of the norm before that linear, where the mixer has one.
        prepares: Whether `prepare` does something to the input before it is projected.
        gate: Where `mix` is no more than an activation of its first argument times the second, the
            name of the activation.
        keeps_float32: Whether results of float32 linears reach `mix` in float32, beside an input of 16
            bits.
        casts: Whether the linear of the result reads it in the dtype of the input.
        partition: How it is divided between processes; `None`: it cannot be, or has no weights.
    """

    projections: Mapping[str, Widths] = MappingProxyType({})
    output: str = ""
    before_output: ClassVar[str] = ""
    prepares: bool = False
    gate: ClassVar[Activation | None] = None
    keeps_float32: ClassVar[bool] = False
    casts: ClassVar[bool] = True
    partition: Partition | None = None
    _dims: int = 0

    mix: Callable[..., Any]
    """The equations."""

    fused: Callable[..., Any] | None = None
    """`mix` as one operation: takes the results of the projections as they lie side by side, in one
    array or several, and beside them what `mix` takes."""

    def make_projections(
        self, dims: int, projections: Mapping[str, Widths], linear: Linears, *, bias: bool = False
    ) -> None:
        """Makes the linears of the input, of `dims`; `linear` makes each, or has what does by name."""
        for name, widths in projections.items():
            self[name] = factory_of(linear, name)(dims, sum(widths), bias=bias)
        self.declare({**self.projections, **projections})

    def make_output(
        self,
        width: int,
        dims: int,
        linear: Linears,
        *,
        bias: bool = False,
        name: str = "output_proj",
    ) -> None:
        """Makes the linear of the result, from the width of what `mix` returns to `dims`."""
        self[name] = factory_of(linear, name)(width, dims, bias=bias)
        self.output = name

    def declare(self, projections: Mapping[str, Widths]) -> None:
        """Says which of its linears are `projections`, in the order in which `mix` takes them."""
        # an ordinary attribute, since items of a module are parameters
        object.__setattr__(self, "projections", dict(projections))

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):
            cls.__init__ = checks_layer(cls.__init__)  # type: ignore[method-assign]
        if {"__call__", "run"} & vars(cls).keys() and "is_cut" not in vars(cls):
            # who computes the projections together with what stands around would pass these by
            cls.is_cut = lambda self, x, state, context: False  # type: ignore[method-assign]

    def is_cut(self, x: mx.array, state: Any, context: Any) -> bool:
        """Returns whether nothing is done to the input of a call but what the projections do, so that
        they may be computed together with what stands before the mixer."""
        return bool(self.projections)

    def checked_state(self, x: mx.array, state: Any) -> Any:
        """The state before an input that the mixer takes.

        Raises:
            TypeError: `x` holds no floats.
            ValueError: `x` has another shape.
        """
        raise NotImplementedError

    def take_part(self, group: Group) -> None:
        """Called before it is divided as `partition` says, for what that cannot express."""

    def has_fused(self, context: Any) -> bool:
        """Returns whether `fused` computes what this call asks for."""
        return self.fused is not None

    def project(self, x: mx.array) -> Parts:
        """The results of the projections; those that are computed together lie in one array."""
        if not self.projections:
            return (x,)
        linears = [self[name] for name in self.projections]
        return inputs(x, linears, dtype=None if self.keeps_float32 else x.dtype)

    def results(self, x: mx.array, projections: Mapping[str, Widths]) -> list[mx.array]:
        """The results of its linears of these names, for those that read something else than `x`."""
        linears = [self[name] for name in projections]
        parts = inputs(x, linears, dtype=None if self.keeps_float32 else x.dtype)
        return widths_of(parts, [width for own in projections.values() for width in own])

    def finish(self, y: mx.array, dtype: mx.Dtype) -> mx.array:
        """The output for the result of `mix`, in the dtype of the input."""
        return finished(self, (y,), dtype)

    def apart(self, parts: Parts) -> list[mx.array]:
        """The arguments of `mix`, in their order."""
        if not self.projections:
            return list(parts)
        return widths_of(parts, [width for own in self.projections.values() for width in own])


class TokenMixer(Mixer):
    """A module that mixes along the sequence.

    `mixer(x, state, valid)` maps `x` of shape `(B, L, D)` to `y` of the same shape and the state after
    the last position. Feeding a sequence whole, in chunks or token by token gives the same result, but
    for rounding. A subclass writes `init_state` and `mix`, whose last two arguments are the state and
    the `Context`, and which gives its result and the new state.
    The state is returned, never kept or changed in place. Positions where `valid`, booleans `(B, L)`,
    is `False` are padding and change nothing. Where `starts`, booleans `(B, L)`, is `True` and the
    position is no padding, a new sample begins in the row: nothing before it is seen from there on,
    and the result, the gradient and the state returned are as for that sample alone.

    A mixer is made as `Mixer(dims, *, ..., linear=Linear)`, with `is_causal` and `max_length` only
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
        padding_last: It is given rows whose padding stands after the tokens, and is zero:
            `context.counts` has their number, and `context.valid` is `None`.
        of_memory: The projections that read the second sequence, where there is one.
        memory_states: The types of states that it has with a second sequence, beside
            `init_state`'s.
        weighs_channels: `mixing_weights` has weights of each channel instead of each head.
        key_value_dims: Numbers of one key of those that its state holds; `None`: it holds none.
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
    padding_last: ClassVar[bool] = False
    of_memory: ClassVar[tuple[str, ...]] = ()
    memory_states: ClassVar[tuple[type, ...]] = ()
    weighs_channels: ClassVar[bool] = False
    key_value_dims: int | None = None

    is_causal: bool = False
    """True if output t of this one depends on inputs up to t only."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
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

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        """The state before the first position."""
        raise NotImplementedError

    def mixing_weights(self, x: mx.array, **arguments: Any) -> mx.array:
        """How much of each position's values the result of each position holds, to be looked at.

        Times the values of a head, they are what the mixer computes before its output's gates, norms
        and projection. Recurrences give the weights of their unrolled form.

        Args:
            x: A sequence from its first token on, without padding, `(B, L, D)`.
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
        **arguments: Any,
    ) -> tuple[mx.array, State]:
        """The one call of every mixer.

        Args:
            x: The sequence, `(B, L, D)`.
            state: The state before; `None`: the state of an empty text.
            valid: Booleans `(B, L)`, `False` where padded.
            starts: Booleans `(B, L)`, `True` where another sample begins in the row.
            memory: A second sequence.
            memory_valid: Booleans `(B, M)`, `False` where that one is padded.
            context: The call of a model, which holds the four before and what its blocks share.
            arguments: What a model makes for this block, such as a lower bound.

        Returns:
            `(B, L, D)` and the new state; where the context asks by position, `StatesByPosition`, or
            the new state if `can_rewind` of its kind says that the tokens can be taken back from it.

        Raises:
            TypeError: The mixer does not take what is given, or `x` holds no floats.
            ValueError: `x` has another shape than `(B, L, D)`.
        """
        if context is None:
            self._check_takes(starts, memory, arguments)
            checked = self.checked_state(x, state)
            caller = type(self).__name__
            valid, starts = boolean_masks(caller, x.shape[:2], valid=valid, starts=starts)
            context = Context(valid, starts=starts, memory=memory, memory_valid=memory_valid)
            if state is not None and not isinstance(state, self.memory_states):
                own = self.init_state(x.shape[0], x.dtype)
                check_state(type(self).__name__, own, state, is_fixed=self.recurrent)
            return self.run(x, checked, context, **arguments)
        return self.run(x, self.checked_state(x, state), context, **arguments)

    def checked_state(self, x: mx.array, state: State) -> State:
        dims = self._dims
        is_array = type(x) is mx.array
        if dims and not (is_array and x.ndim == 3 and x.shape[2] == dims and x.dtype in FLOATS):
            check_sequences(type(self).__name__, x, dims)
        return self.init_state(x.shape[0], x.dtype) if state is None else state

    def run(
        self, x: mx.array, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        """Like `__call__`, of checked arguments."""
        if not x.shape[1]:
            return x, state
        if self.is_cut(x, state, context):
            parts, state = self.between(self.project(x), state, context, **arguments)
            return finished(self, parts, x.dtype), state
        if context.by_position and not self.state_kind.can_rewind(state, x.shape[1]):
            one = partial(self._run_one, **arguments)
            return one_by_one(one, (x,), state, context)
        given = context
        if self.padding_last:
            x, context = given.padding_moved(x), given.with_padding_last()
        z, state = self.prepare(x, state, context) if self.prepares else (x, state)
        parts = self.project(z) if context.memory is None else self.project_both(z, context.memory)
        parts, state = self.between(parts, state, context, **arguments)
        y = finished(self, parts, x.dtype)
        return given.padding_moved_back(y) if self.padding_last else y, state

    def _run_one(
        self, parts: Parts, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        return self.run(parts[0], state, context, **arguments)

    def is_cut(self, x: mx.array, state: State, context: Context) -> bool:
        return bool(
            self.projections
            and not self.prepares
            and context.memory is None
            and not (self.padding_last and context.valid is not None)
            and x.shape[1]
        )

    def prepare(self, x: mx.array, state: State, context: Context) -> tuple[mx.array, State]:
        """Changes the input before it is projected, where the mixer `prepares` it."""
        return x, state

    def project_both(self, x: mx.array, memory: mx.array) -> Parts:
        """Like `project`, where those `of_memory` read the second sequence."""
        if not self.projections:
            return (x,)
        return tuple(
            self[name](memory if name in self.of_memory else x) for name in self.projections
        )

    def between(
        self, parts: Parts, state: State, context: Context, **arguments: Any
    ) -> tuple[Parts, State]:
        """The input of the output projection, computed from the projections' results, and the state."""
        mix: Any = partial(self._mixed, **arguments) if arguments else self._mixed
        if context.by_position and not self.state_kind.can_rewind(state, parts[0].shape[1]):
            y, state = one_by_one(mix, parts, state, context)
        else:
            y, state = mix(parts, state, context)
        return (y,), state

    def _mixed(
        self, parts: Parts, state: State, context: Context, **arguments: Any
    ) -> tuple[mx.array, State]:
        """By the definition, or as one operation that computes the same."""
        y: mx.array
        if self.fused is not None and fuses() and self.has_fused(context):
            y, state = self.fused(parts, state, context, **arguments)
        else:
            y, state = self.mix(*self.apart(parts), state, context, **arguments)
        return y, state

    def _check_takes(
        self, starts: mx.array | None, memory: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Refuses what a mixer of another kind is called with."""
        if arguments:
            check_known(type(self).__name__, arguments, _call_arguments(type(self)))
        for name, given, takes in (
            ("starts", starts, self.packs_samples),
            ("memory", memory, self.cross),
        ):
            if given is not None and not takes:
                raise TypeError(
                    f"[{type(self).__name__}] '{name}' must be left out, since the mixer does not take "
                    "it. mmfree mixers lists those that do."
                )


@cache
def _call_arguments(mixer: type[TokenMixer]) -> tuple[str, ...]:
    """The names of the arguments of a mixer's call: every mixer's, and its own after a `*`."""
    own = {
        name: None
        for function in (mixer.run, getattr(mixer, "mix", mixer.run))
        for name, each in signature(function).parameters.items()
        if each.kind is Parameter.KEYWORD_ONLY
    }
    common = signature(mixer.__call__).parameters
    return (*(name for name in common if name not in ("self", "context", "arguments")), *own)


def one_by_one(
    mix: Callable[[Parts, State, Context], tuple[mx.array, State]],
    parts: Parts,
    state: State,
    context: Context,
) -> tuple[mx.array, StatesByPosition]:
    """The result of `mix` for each position after those before it, and the state after each."""
    results, states = [], []
    calls = [context.at(n) for n in range(parts[0].shape[1])]
    for n, call in enumerate(calls):
        y, state = mix(tuple(part[:, n : n + 1] for part in parts), state, call)
        results.append(y)
        states.append(state)
    context.take_cross_layer(calls)
    return mx.concatenate(results, axis=1), StatesByPosition(tuple(states))


class ChannelMixer(Mixer):
    """A module that mixes within each position; a subclass computes it in `mix`.

    One that looks back, as RWKV's does, is a `TokenMixer`, which a block takes in its place.

    Attributes:
        name: What a description of a model calls it; `""`: the name of its file.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> class Doubling(ChannelMixer):
        ...     def mix(self, x):
        ...         return 2 * x
        >>> Doubling()(mx.ones((1, 2))).tolist()
        [[2.0, 2.0]]
    """

    name: ClassVar[str] = ""

    casts = False

    def __call__(self, x: mx.array) -> mx.array:
        return self.run(x, self.checked_state(x, None), None)[0]

    def checked_state(self, x: mx.array, state: State) -> State:
        dims = self._dims
        is_array = type(x) is mx.array
        if dims and not (is_array and x.shape[-1:] == (dims,) and x.dtype in FLOATS):
            check_features(type(self).__name__, x, dims)
        return state

    def run(self, x: mx.array, state: State, context: Context | None) -> tuple[mx.array, State]:
        """The result, and the state that a token mixer in its place would have."""
        parts, state = self.between(self.project(x), state, context)
        return finished(self, parts, x.dtype), state

    def is_cut(self, x: mx.array, state: State, context: Context | None) -> bool:
        return super().is_cut(x, state, context)

    def between(self, parts: Parts, state: State, context: Context | None) -> tuple[Parts, State]:
        """The input of the output projection, or what the `gate` makes it of, and the state."""
        if self.gate is not None and fuses():
            return parts, state
        return (self.mix(*self.apart(parts)),), state


class SpatialMixer(Mixer):
    """A module that mixes the positions of a map: maps `(B, H, W, D)` to the same shape.

    It is made as `Mixer(dims, *, ..., linear=Linear)` and takes maps of any height and width. A
    subclass sets `_dims` and writes `mix`.

    Attributes:
        name: What a description of a model calls it; `""`: the name of its file.
        equation: What it computes, in a line.
        complexity: Multiplications for a map of `T` positions of `D` dims.
        paper: Where it was published.
    """

    equation: ClassVar[str] = ""
    complexity: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __call__(self, x: mx.array) -> mx.array:
        check_map(type(self).__name__, x, self._dims)
        return self.run(x)

    def run(self, x: mx.array, **arguments: Any) -> mx.array:
        """Like `__call__`, of a checked input."""
        return self.finish(self.mix(*self.apart(self.project(x)), **arguments), x.dtype)


def check_map(caller: str, x: mx.array, dims: int) -> None:
    """Refuses an input of a spatial mixer that is no map of `dims` floats with at least one position.

    Raises:
        TypeError: It holds no floats.
        ValueError: It has another number of axes, another size, or no positions.
    """
    if x.ndim != 4:
        hint = " Add a batch axis: x[None]." if x.ndim == 3 else ""
        raise ValueError(
            f"[{caller}] 'x' must have the four axes (batch, height, width, dims) but got shape "
            f"{x.shape}.{hint}"
        )
    check_features(caller, x, dims)
    if 0 in x.shape[1:3]:
        raise ValueError(f"[{caller}] 'x' must have at least one position but got shape {x.shape}.")

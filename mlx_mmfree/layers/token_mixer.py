"""The interface that every token mixer follows."""

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from .context import Context
from .linear_factory import LinearFactory as LinearFactory
from .partition import Group, Partition
from .quantized_array import Quantization
from .state_kind import State as State
from .state_kind import StateKind, StatesByPosition


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

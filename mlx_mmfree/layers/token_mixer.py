"""The interface that every token mixer follows."""

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

State = Any
"""A tree of arrays, each with the batch on axis 0; `()` where a mixer carries nothing."""

LinearFactory = Callable[..., nn.Module]
"""Makes a projection: called as `linear(input_dims, output_dims, bias=...)`."""


class TokenMixer(nn.Module):
    """A module that mixes along the sequence.

    `mixer(x, state, valid)` maps `x` of shape `(B, L, D)` to `y` of the same shape and the state after
    the last position. Feeding a sequence whole, in pieces or token by token gives the same result.
    The state is returned, never kept or changed in place. Positions where `valid`, booleans `(B, L)`,
    is `False` are padding and change nothing. Where `starts`, booleans `(B, L)`, is `True` and the
    position is no padding, a new sample begins in the row: nothing before it is seen from there on,
    and the result, the gradient and the state returned are those of that sample alone.

    A mixer is made as `Mixer(dims, *, ..., linear=nn.Linear)`, with `is_causal` and `max_length` only
    where they mean something. What it can do is declared:

    Attributes:
        causal: It can be built so that output t depends on inputs up to t only.
        bidirectional: It can be built to see the whole sequence.
        cross: `__call__` takes a second sequence as `memory=` and `memory_valid=`.
        recurrent: Its state has a constant size.
        length_bound: It is made with `max_length=` and takes no longer sequence.
    """

    causal: ClassVar[bool] = False
    bidirectional: ClassVar[bool] = False
    cross: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False
    length_bound: ClassVar[bool] = False

    def init_state(self, batch_size: int, dtype: mx.Dtype) -> State:
        """The state before the first position."""
        raise NotImplementedError

    def blank_state(self, batch_size: int, length: int, dtype: mx.Dtype) -> State:
        """A state of the shapes and dtypes that `length` tokens leave, unpadded.

        `int32` arrays hold what the tokens would leave, the others zeros.
        """
        return self.init_state(batch_size, dtype)

    def can_rewind(self, state: State, count: int) -> bool:
        """Whether `rewound` gives back what the state is now once up to `count` tokens are added."""
        return False

    def rewound(self, state: State, count: int) -> State:
        """The state before its last `count` tokens, where `can_rewind` promised it."""
        raise NotImplementedError

    def fixed_state(self, state: State) -> tuple[State, int | None] | None:
        """The state in a form whose shapes stay while tokens are read one by one.

        Returns:
            The state and the number of tokens that it has room for, `None` for any; or `None` where
            there is no such form.
        """
        return (state, None) if self.recurrent else None

    def growing_state(self, state: State, unread: int | None) -> State:
        """The ordinary form of a `fixed_state` after `unread` tokens fewer than it had room for."""
        return state

    def __call__(
        self,
        x: mx.array,
        state: State = None,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
    ) -> tuple[mx.array, State]:
        raise NotImplementedError

    def residual(
        self,
        x: mx.array,
        norm: nn.Module,
        state: State = None,
        valid: mx.array | None = None,
        **context: Any,
    ) -> tuple[mx.array, State]:
        """`x + mixer(norm(x))` and the state; `context` goes to the mixer.

        A mixer overrides it to compute norm and sum together with its projections.
        """
        y, state = self(norm(x), state, valid, **context)
        return x + y, state

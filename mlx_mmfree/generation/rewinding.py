"""A model that reads tokens and takes the last of them back."""

from typing import Any

import mlx.core as mx

from ..layers.mixer import State, StateKind, StatesByPosition
from ..models import Decoder
from .finite import are_finite
from .reader import Reader


class RewindingReader(Reader):
    """Reads tokens of one text, several at a time, and takes back those that turn out wrong.

    Attention forgets the keys and values of such tokens. A state that is not shortened, as that of a
    recurrence, is kept after each token instead.

    Args:
        model: Gives the logits.
        state: What it has read.
        ahead: How many tokens follow the first that are read after `take_back`, at most.
    """

    def __init__(self, model: Decoder, state: Any, ahead: int):
        super().__init__(model, state)
        self._ahead = ahead
        self._trails = [_Trail(mixer.state_kind) for mixer in model.token_mixers]
        self._unsettled = 0

    @staticmethod
    def _run(
        model: Decoder, block_arguments: list[dict[str, mx.array]], tokens: mx.array, state: Any
    ) -> tuple[mx.array, mx.array, Any]:
        hidden, state = model.hidden(
            tokens, state, block_arguments=block_arguments, by_position=True
        )
        logits = model.logits(hidden)[0].astype(mx.float32)
        return logits, are_finite(logits), state

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens `(1, L)`.

        Returns:
            The logits after each, float32 `(L, V)`, and which are finite, `(L,)`, yet to be computed.
        """
        length = tokens.shape[1]
        if not self._unsettled:
            self._make_room(length + self._ahead)
        logits, finite, states = self._step(tokens, self.arrays)
        self.arrays = tuple(
            trail.add(state, length) for trail, state in zip(self._trails, states, strict=True)
        )
        self._size += length
        self._unsettled += length
        return logits, finite

    def take_back(self, count: int) -> None:
        """Forgets the last `count` tokens, of those that were read since the last call."""
        if self._unsettled:
            self.arrays = tuple(trail.settled(count) for trail in self._trails)
        self._size -= count
        self._unsettled = 0


class _Trail:
    """The states of a block after tokens that may be taken back.

    Args:
        kind: Shortens states.
    """

    def __init__(self, kind: StateKind):
        self._kind = kind
        # one for each stretch of tokens, and its length
        self._stretches: list[tuple[State | StatesByPosition, int]] = []

    def add(self, state: State | StatesByPosition, length: int) -> State:
        """Takes what the mixer gave for so many tokens, and returns the state after them."""
        stretches = self._stretches
        if isinstance(state, StatesByPosition):
            stretches.append((state, length))
            return state.states[-1]
        # only the last state is held, since memory that nothing else holds is written in place
        if stretches and not isinstance(stretches[-1][0], StatesByPosition):
            length += stretches.pop()[1]
        stretches.append((state, length))
        return state

    def settled(self, count: int) -> State:
        """The state before the last `count` tokens, fewer than there are; none can go back behind it."""
        stretches, self._stretches = self._stretches, []
        while count >= stretches[-1][1]:
            count -= stretches.pop()[1]
        state, _ = stretches[-1]
        if isinstance(state, StatesByPosition):
            return state.states[-1 - count]
        return self._kind.rewound(state, count) if count else state

"""A model in the middle of a text: it reads the next tokens through one compiled graph."""

from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..models import Decoder
from ..ops.backend.compilation import can_compile, compiled
from .finite import are_finite
from .key_values import fixed_state, growing_state

State = Any


class Reader:
    """Reads tokens and gives the logits after them.

    The state takes a form whose shapes stay, where the model has one. MLX then repeats the graph that
    was built in Python for the first tokens of a shape, until the room for keys and values grows.

    Args:
        model: Gives the logits.
        state: What it has read of each row.

    Attributes:
        arrays: The state as it is, for MLX to compute.
    """

    def __init__(self, model: Decoder, state: State):
        self._model = model
        self._block_arguments = model.block_arguments()
        mx.eval(self._block_arguments)
        self._prepare(state, 1)

    @property
    def state(self) -> State:
        """What the model has read, in the ordinary form, which any number of tokens may follow."""
        return growing_state(self._model, self.arrays, self._rooms, self._size)

    def _prepare(self, state: State, count: int) -> None:
        self._size = 0
        self._rooms: tuple[int | None, ...] = ()
        self.arrays = state
        if can_compile():
            self.arrays, self._rooms = fixed_state(self._model, state, count)
        self._room = min((room for room in self._rooms if room is not None), default=None)
        step = partial(self._run, self._model, self._block_arguments)
        self._step = compiled(step) if self._rooms else step

    def _make_room(self, count: int) -> None:
        """Lets the state take so many more tokens in the form that it has."""
        if self._room is not None and self._size + count > self._room:
            self._prepare(self.state, count)

    @staticmethod
    def _run(
        model: Decoder, block_arguments: list[dict[str, mx.array]], tokens: mx.array, state: State
    ) -> tuple[mx.array, mx.array, State]:
        hidden, state = model.hidden(tokens[:, None], state, block_arguments=block_arguments)
        logits = model.logits(hidden).squeeze(1).astype(mx.float32)
        return logits, are_finite(logits), state

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Reads tokens `(B,)`.

        Returns:
            The logits after them, float32 `(B, V)`, and whether all are finite, yet to be computed.
        """
        self._make_room(1)
        logits, finite, self.arrays = self._step(tokens, self.arrays)
        self._size += 1
        return logits, finite

    def keep(self, rows: mx.array) -> None:
        """Drops all rows of the batch but these."""
        self.arrays = tree_map(lambda array: array[rows], self.arrays)

"""A model in the middle of a text: it reads the next tokens through one compiled graph."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from ..models import Decoder
from ..ops.backend.compilation import can_compile, compiled
from .finite import are_finite
from .key_values import fixed_state, growing_state

State = Any
Shapes = tuple[tuple[int, ...], ...]
Step = Callable[..., Any]

_MOST_SHAPES = 4


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
        self._can_compile = can_compile()
        self._steps: dict[Shapes, Step] = {}
        self._prepare(state, 1)

    @property
    def state(self) -> State:
        """What the model has read, in the ordinary form, which any number of tokens may follow."""
        return growing_state(self._model, self.arrays, self._rooms, self._size)

    def _prepare(self, state: State, count: int) -> None:
        self._size = 0
        self._rooms: tuple[int | None, ...] = ()
        self.arrays = state
        if self._can_compile:
            self.arrays, self._rooms = fixed_state(self._model, state, count)
        self._room = min((room for room in self._rooms if room is not None), default=None)
        self._step = self._step_for(
            tuple(array.shape[1:] for _, array in cast(Any, tree_flatten(self.arrays)))
        )

    def _step_for(self, shapes: Shapes) -> Step:
        """What reads tokens into a state of these shapes; it builds a graph for each number of rows."""
        step = self._steps.pop(shapes, None)
        if step is None:
            step = partial(self._run, self._model, self._block_arguments)
            step = compiled(step) if self._rooms else step
        self._steps[shapes] = step
        if len(self._steps) > _MOST_SHAPES:
            # graphs of the shapes that were used longest ago
            del self._steps[next(iter(self._steps))]
        return step

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
            The logits after them, float32 `(B, V)`, and which rows are finite, `(B,)`, both yet to be
            computed.
        """
        self._make_room(1)
        logits, finite, self.arrays = self._step(tokens, self.arrays)
        self._size += 1
        return logits, finite

    def go_on(self, state: State) -> None:
        """Goes on with other rows; the graphs for numbers of rows are kept.

        Args:
            state: That of the rows, in the ordinary form.
        """
        self._prepare(state, 1)

"""One step of decoding as a function of arrays alone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ...errors import UnsupportedModelError
from ...layers.matrix import parameters
from ...models import Decoder, check_causal
from ..key_values import fixed_state

TOKEN_DTYPE = mx.uint32
"""The dtype of `mx.argmax`, so that a token can be read as it was chosen."""

_STATE = "state"
_BLOCK_ARGUMENTS = "block_arguments."


class DecodingStep:
    """One step of decoding for one text.

    Called without arrays, it gives the arrays of the state before the first token. Called with a token,
    uint32 `(1,)`, and the arrays of a state, it gives the logits after it, float32 `(1, V)`, and the
    arrays of the state after it. After a token outside the vocabulary, and once the state has no room
    for another token, the logits are NaN.

    Args:
        model: Continues texts.
        context: The number of tokens that attention has room for, at least. A state of constant size
            takes any number.

    Attributes:
        weights: What a step is computed with, by name. Steps take other arrays of the same shapes by
            these names.
        state: The arrays of the state before the first token, by name and in order.
        room: The number of tokens that a state takes, or `None` for any.

    Raises:
        UnsupportedModelError: The model cannot continue texts, or has no state of fixed shapes.
    """

    def __init__(self, model: Decoder, context: int):
        check_causal(model)
        self._model, self._context = model, context
        self._tree, self._rooms = fixed_state(model, model.init_state(1), context)
        if not self._rooms:
            raise _without_fixed_state(model)
        rooms = (room for room in (*self._rooms, model.max_length) if room is not None)
        self.room = min(rooms, default=None)
        self.state = dict(_named(self._tree, _STATE))
        self._arguments: Any = model.block_arguments()
        self._own_weights = parameters(model)
        folded = {_BLOCK_ARGUMENTS + name: array for name, array in _flat(self._arguments)}
        self.weights = self._own_weights | folded
        mx.eval(self.state, self.weights)

    def __call__(self, *arrays: mx.array, **weights: mx.array) -> list[mx.array]:
        if not arrays:
            return self._first()
        token, *state = arrays
        with self._replaced(weights):
            return self._next(token, _filled(self._tree, state), self._block_arguments(weights))

    def _first(self) -> list[mx.array]:
        """The arrays of the first state, made anew, so that a graph need not hold their numbers."""
        return [
            array if (value := uniform(array)) is None else mx.full(array.shape, value, array.dtype)
            for array in self.state.values()
        ]

    def _next(self, token: mx.array, state: Any, arguments: Any) -> list[mx.array]:
        hidden, after = self._model.known_hidden(token[:, None], state, block_arguments=arguments)
        logits = self._model.logits(hidden).squeeze(1).astype(mx.float32)
        for free in self._free(state):
            logits = mx.where(free, logits, mx.nan)
        return [logits, *(array for _, array in _flat(after))]

    def _free(self, state: Any) -> Iterator[mx.array]:
        """For each mixer whose state is full at some time, whether it has room for a token."""
        for mixer, room, part in zip(self._model.token_mixers, self._rooms, state, strict=True):
            if room is not None:
                for positions in mixer.state_kind.counted(part):
                    yield mx.any(positions < 0)

    def _block_arguments(self, weights: Mapping[str, mx.array]) -> Any:
        names = [_BLOCK_ARGUMENTS + name for name, _ in _flat(self._arguments)]
        return _filled(self._arguments, [weights.get(name, self.weights[name]) for name in names])

    @contextmanager
    def _replaced(self, weights: Mapping[str, mx.array]) -> Iterator[None]:
        """Puts other arrays in the place of the model's weights inside the `with` block."""
        given = {name: weights[name] for name in self._own_weights if name in weights}
        self._model.update(cast(Any, tree_unflatten(list(given.items()))))
        try:
            yield
        finally:
            self._model.update(cast(Any, tree_unflatten(list(self._own_weights.items()))))


def uniform(array: mx.array) -> float | None:
    """The number that all places of an array hold, or `None` if they differ."""
    first = array.reshape(-1)[:1]
    if not array.size or not mx.all(array == first).item():
        return None
    return cast(float, first.item())


def _without_fixed_state(model: Decoder) -> UnsupportedModelError:
    state = model.init_state(1)
    pairs = zip(model.token_mixers, state, strict=True)
    names = {type(mixer).__name__ for mixer, part in pairs if mixer.state_kind.fixed(part) is None}
    return UnsupportedModelError(
        "[export] each token mixer must have a state of fixed shapes, because an exported function does "
        f"not change them, but {', '.join(sorted(names))} keeps one that grows. Export another model."
    )


def _named(tree: Any, name: str) -> Iterator[tuple[str, mx.array]]:
    """The arrays of a state by the names of their fields, in the order of `tree_flatten`."""
    if isinstance(tree, mx.array):
        yield name, tree
        return
    fields = getattr(tree, "_fields", range(len(tree)))
    for field, part in zip(fields, tree, strict=True):
        yield from _named(part, f"{name}.{field}")


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    return cast(list[tuple[str, mx.array]], tree_flatten(tree))


def _filled(tree: Any, arrays: list[mx.array]) -> Any:
    """A tree of the same form with other arrays, in the order of `tree_flatten`."""
    rest = iter(arrays)
    return tree_map(lambda _: next(rest), tree)

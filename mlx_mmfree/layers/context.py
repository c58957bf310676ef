"""The context of a call, which all blocks share, and what they compute of it once."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any, TypeVar, cast

import mlx.core as mx

T = TypeVar("T")


class Context:
    """The tokens of one call, as all its blocks see them.

    A model makes one for each call and hands it down; a mixer that is called alone makes its own.

    Args:
        valid: Booleans `(B, L)`, `False` where padded; `None`: nothing is.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row; padding begins none.
        memory: A second sequence, `(B, M, D)`.
        memory_valid: Booleans `(B, M)`, `False` where that one is padded.
        by_position: Whether the caller may take the last tokens back, so that a mixer whose state is not
            shortened gives the one after each token.

    Attributes:
        counts: How many tokens each row has, `(B,)`, where padding stands after them, as
            `with_padding_last` gives it; `None` elsewhere.
        cross_layer: What a layer hands to those after it, by names, `(B, L, ...)`.
    """

    def __init__(
        self,
        valid: mx.array | None = None,
        *,
        starts: mx.array | None = None,
        memory: mx.array | None = None,
        memory_valid: mx.array | None = None,
        by_position: bool = False,
    ):
        if starts is not None and valid is not None:
            starts = mx.logical_and(starts, valid)
        self.valid = valid
        self.starts = starts
        self.memory = memory
        self.memory_valid = memory_valid
        self.by_position = by_position
        self.counts: mx.array | None = None
        self.cross_layer: dict[str, mx.array] = {}
        self._made: dict[Hashable, Any] = {}

    def memoised(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`; later calls with the same key get the same.

        Blocks share positions, slots and masks in this way. All of them have read the same tokens,
        so that a key needs only how they are stored, such as the size of a window.
        """
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])

    def with_memory(self, memory: mx.array | None) -> "Context":
        """The same call with another array in place of the second sequence."""
        other = copy(self)
        other.memory = memory
        return other

    def at(self, position: int) -> "Context":
        """That of one token of the call, which follows those before it."""
        part = self.part(position, position + 1)
        for name, value in self.cross_layer.items():
            part.cross_layer.setdefault(name, value[:, position : position + 1])
        return part

    def take_cross_layer(self, parts: Sequence["Context"]) -> None:
        """Takes over what a layer passed on that has read the call token by token."""
        for name in parts[0].cross_layer.keys() - self.cross_layer.keys():
            self.cross_layer[name] = mx.concatenate(
                [part.cross_layer[name] for part in parts], axis=1
            )

    def part(self, start: int, stop: int) -> "Context":
        """That of some tokens of the call, which follow those before them."""
        key = ("part", start, stop, self.counts is None)
        return self.memoised(key, lambda: self._part(start, stop))

    def _part(self, start: int, stop: int) -> "Context":
        valid, starts = (
            None if each is None else each[:, start:stop] for each in (self.valid, self.starts)
        )
        part = Context(valid, starts=starts, memory=self.memory, memory_valid=self.memory_valid)
        if self.counts is not None:
            part.counts = mx.clip(self.counts - start, 0, stop - start)
        return part

    def with_padding_last(self) -> "Context":
        """The same call once padding stands after the tokens of its row, as `padding_moved` moves it."""
        if self.valid is None:
            return self
        other = copy(self)
        _, _, other.counts, other.starts = self._padding_last(self.valid)
        other.valid = None
        return other

    def padding_moved(self, x: mx.array) -> mx.array:
        """An array `(B, L, ...)` whose padding is moved after the tokens of its row, and zero."""
        if self.valid is None:
            return x
        order, *_ = self._padding_last(self.valid)
        valid, order = (_beside(each, x) for each in (self.valid, order))
        return mx.take_along_axis(mx.where(valid, x, mx.zeros((), x.dtype)), order, axis=1)

    def padding_moved_back(self, y: mx.array) -> mx.array:
        """Undoes `padding_moved`: an array in the order of the call, zero where padded."""
        if self.valid is None:
            return y
        _, back, *_ = self._padding_last(self.valid)
        valid, back = (_beside(each, y) for each in (self.valid, back))
        return mx.where(valid, mx.take_along_axis(y, back, axis=1), mx.zeros((), y.dtype))

    def _padding_last(self, valid: mx.array) -> tuple[Any, ...]:
        return self.memoised("padding last", lambda: _padding_last(valid, self.starts))


def _beside(each: mx.array, x: mx.array) -> mx.array:
    """An array `(B, L)` with the axes of `x`, `(B, L, ...)`."""
    return each.reshape(*each.shape, *[1] * (x.ndim - 2))


def count_on(count: mx.array, length: int, context: Context) -> tuple[mx.array, mx.array]:
    """The position of each token in its sample, and how many tokens the last sample has.

    Args:
        count: Tokens of each row that were read before, integers `(B,)`.
        length: Positions of the call.
        context: The call. Padding counts for nothing, and has any position.

    Returns:
        Integers `(B, L)` from 0, and the count after the call, `(B,)`.
    """
    if not length:
        return mx.zeros((count.shape[0], 0), count.dtype), count
    if context.valid is None:
        seen = mx.broadcast_to(mx.arange(1, length + 1), (count.shape[0], length))
    else:
        seen = mx.cumsum(context.valid.astype(count.dtype), axis=1)
    seen = seen + count[:, None]
    if context.starts is not None:
        seen = seen - mx.cummax(mx.where(context.starts, seen - 1, 0), axis=1)
    return mx.maximum(seen - 1, 0), seen[:, -1]


def sample_begins(starts: mx.array, before: int | mx.array = 0) -> mx.array:
    """Where in its row the sample of each position begins.

    Args:
        starts: Booleans `(B, L)`, `True` at the first position of a sample.
        before: Number of positions of the row that were read before, a number or `(B,)`. What no
            start precedes belongs to a sample that began at 0.

    Returns:
        Integers `(B, L)`, counted from the first position of the row.
    """
    if isinstance(before, mx.array):
        before = before[:, None]
    position = mx.arange(starts.shape[1]) + before
    return mx.cummax(mx.where(starts, position, 0), axis=1)


def _padding_last(valid: mx.array, starts: mx.array | None) -> tuple[mx.array | None, ...]:
    """The order of the positions with padding last and the way back, both `(B, L)`, the number of tokens
    of each row, `(B,)`, and where samples begin in that order."""
    batch, length = valid.shape
    order = mx.argsort(mx.where(valid, 0, length) + mx.arange(length), axis=1)
    # over empty rows MLX's sum may never end on a CPU
    counts = valid.sum(axis=1) if length else mx.zeros((batch,), mx.int32)
    if starts is not None:
        starts = mx.take_along_axis(starts, order, axis=1)
    return order, mx.argsort(order, axis=1), counts, starts

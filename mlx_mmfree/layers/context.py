"""The context of a call, which all blocks share, and what they compute of it once."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

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
        handed: What a layer hands to those after it, by names, `(B, L, ...)`.
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
        self.handed: dict[str, mx.array] = {}
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`; later calls with the same key get the same.

        Blocks share positions, slots and masks in this way. All of them have read the same tokens,
        so that a key needs to say only how they are kept, such as the size of a window.
        """
        if key not in self._made:
            self._made[key] = make()
        return cast(T, self._made[key])

    def with_memory(self, memory: mx.array | None) -> "Context":
        """The same call with another array in place of the second sequence."""
        other = Context(self.valid, memory=memory, memory_valid=self.memory_valid)
        other.starts, other._made = self.starts, self._made
        other.by_position, other.handed = self.by_position, self.handed
        return other

    def at(self, position: int) -> "Context":
        """That of one token of the call, which follows those before it."""
        part = self.part(position, position + 1)
        for name, value in self.handed.items():
            part.handed.setdefault(name, value[:, position : position + 1])
        return part

    def take_handed(self, parts: Sequence["Context"]) -> None:
        """Takes over what a layer handed on that has read the call token by token."""
        for name in parts[0].handed.keys() - self.handed.keys():
            self.handed[name] = mx.concatenate([part.handed[name] for part in parts], axis=1)

    def part(self, start: int, stop: int) -> "Context":
        """That of some tokens of the call, which follow those before them."""
        return self.once(("part", start, stop), lambda: self._part(slice(start, stop)))

    def _part(self, part: slice) -> "Context":
        valid, starts = (
            None if each is None else each[:, part] for each in (self.valid, self.starts)
        )
        return Context(valid, starts=starts, memory=self.memory, memory_valid=self.memory_valid)


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
    place = mx.arange(starts.shape[1]) + before
    return mx.cummax(mx.where(starts, place, 0), axis=1)


Carried = TypeVar("Carried")


class RealTokens(NamedTuple):
    """The tokens of a call that are no padding, at the front of their rows.

    Attributes:
        counts: How many there are in each row, `(B,)`; `None`: every position is one.
        starts: Booleans `(B, L)`, `True` where another sample begins in the row.
    """

    counts: mx.array | None
    starts: mx.array | None

    @classmethod
    def all_of(cls, context: Context) -> "RealTokens":
        """Those of rows without padding."""
        return cls(None, context.starts)

    def part(self, start: int, stop: int) -> "RealTokens":
        """Those of a part of the rows."""
        counts, starts = self
        return RealTokens(
            None if counts is None else mx.clip(counts - start, 0, stop - start),
            None if starts is None else starts[:, start:stop],
        )


def padding_last(context: Context, valid: mx.array) -> tuple[mx.array, mx.array, RealTokens]:
    """How padding is moved after the tokens, the same for all layers of a call.

    Args:
        context: The call.
        valid: Its booleans `(B, L)`, `False` where padded.

    Returns:
        The order of the positions with padding last, the way back, both `(B, L)`, and the tokens.
    """
    return context.once("padding last", lambda: _padding_last(context, valid))


def _padding_last(context: Context, valid: mx.array) -> tuple[mx.array, mx.array, RealTokens]:
    batch, length = valid.shape
    order = mx.argsort(mx.where(valid, 0, length) + mx.arange(length), axis=1)
    # over empty rows MLX's sum may never end on a CPU
    counts = valid.sum(axis=1) if length else mx.zeros((batch,), mx.int32)
    starts = context.starts
    if starts is not None:
        starts = mx.take_along_axis(starts, order, axis=1)
    return order, mx.argsort(order, axis=1), RealTokens(counts, starts)


def read_without_padding(
    x: mx.array,
    context: Context,
    read: Callable[[mx.array, RealTokens], tuple[mx.array, Carried]],
) -> tuple[mx.array, Carried]:
    """The result of `read` for rows whose padding comes after their tokens.

    Args:
        x: `(B, L, D)`, padded anywhere.
        context: The call.
        read: Called with `x`, zero where padded, and the tokens; gives `(B, L, V)` and what is carried.

    Returns:
        `(B, L, V)` in the order of `x`, zero where padded, and what is carried.
    """
    valid = context.valid
    if valid is None:
        return read(x, RealTokens.all_of(context))
    order, back, tokens = padding_last(context, valid)
    x = mx.where(valid[..., None], x, mx.zeros((), x.dtype))
    y, carried = read(mx.take_along_axis(x, order[..., None], axis=1), tokens)
    y = mx.take_along_axis(y, back[..., None], axis=1)
    return mx.where(valid[..., None], y, mx.zeros((), y.dtype)), carried

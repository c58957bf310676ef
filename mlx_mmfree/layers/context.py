"""What a call of a model gives all its blocks, and what they compute of it once."""

from collections.abc import Callable, Hashable
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
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; whoever comes later with the same key gets the same.

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
        other.by_position = self.by_position
        return other

    def at(self, position: int) -> "Context":
        """That of one token of the call, which follows those before it."""
        return self.part(position, position + 1)

    def part(self, start: int, stop: int) -> "Context":
        """That of some tokens of the call, which follow those before them."""
        return self.once(("part", start, stop), lambda: self._part(slice(start, stop)))

    def _part(self, part: slice) -> "Context":
        valid, starts = (
            None if each is None else each[:, part] for each in (self.valid, self.starts)
        )
        return Context(valid, starts=starts, memory=self.memory, memory_valid=self.memory_valid)

"""Beginnings of prompts, each read once, whoever asks for it."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

State = Any


class Beginning:
    """The first tokens of one or several prompts, and what the model keeps of them.

    Args:
        tokens: A prompt.
        length: How many of its tokens they are.
        before: A shorter beginning of it, to go on from; `None`: `state` is where to go on.
        position: How many tokens `state` has read.
        state: What the model keeps of them, in the ordinary form, for a batch of one.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        length: int,
        before: "Beginning | None",
        position: int,
        state: State,
    ):
        self.tokens = tokens
        self.length = length
        self.position = position
        self.state = state
        self._before = before

    @property
    def is_read(self) -> bool:
        """Whether `state` is that after all of its tokens."""
        return self.position == self.length and self._before is None

    @property
    def next_unread(self) -> "Beginning":
        """What must be read next on the way to this one: itself, or a shorter one."""
        part = self
        while part._before is not None and not part._before.is_read:
            part = part._before
        return part

    def start(self) -> None:
        """Takes over what the shorter beginning has read."""
        if self._before is not None:
            self.position, self.state = self._before.position, self._before.state
            self._before = None

    def advance(self, count: int, state: State) -> None:
        """Notes that `count` more tokens are read."""
        self.position += count
        self.state = state


class Beginnings:
    """Finds the beginnings that are being read, so that prompts which are alike share them."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[int, bytes], Beginning] = WeakValueDictionary()

    def of(
        self, tokens: Sequence[int], marks: Sequence[int], position: int, state: State
    ) -> tuple[Beginning, int]:
        """All tokens of a prompt but the last, to be read in parts.

        Args:
            tokens: The prompt.
            marks: Numbers of tokens after which a part ends.
            position: How many tokens are known.
            state: What the model keeps of them.

        Returns:
            The longest beginning, which goes on from shorter ones, and how many of its tokens are known
            or read for another prompt.
        """
        last = len(tokens) - 1
        digest, start = blake2b(digest_size=16), 0
        array = np.array(tokens, np.int32)
        whole: Beginning | None = None
        for end in sorted({mark for mark in marks if position < mark < last} | {last}):
            digest.update(array[start:end].tobytes())
            start = end
            key = (end, digest.digest())
            known = self._known.get(key)
            if known is None:
                whole = Beginning(tokens, end, whole, position, state)
                self._known[key] = whole
            else:
                whole, position = known, end
        assert whole is not None
        return whole, position

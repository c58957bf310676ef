"""A mixture that takes every sequence of a file once before any of them comes again."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from .keyed_order import keyed_order
from .mixture import Stage, Tokens, stage_shares

_CYCLE = 2**16
"""Rows over which the shares of the files are exact, as nearly as whole numbers of rows allow."""


class EpochMixture:
    """Sequences without repetition: each file is cut into windows, which come in a shuffled order.

    When all windows of a file have been drawn, they are cut at other places and shuffled anew. Which
    file gives a row is decided by its share, in a shuffled order too. Nothing has to be kept from step
    to step, and no list of the windows is made.

    Args:
        tokens, stages, seed, steps, rows, length: As for `RandomMixture`.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        stages: Sequence[Stage],
        seed: int,
        *,
        steps: int,
        rows: int,
        length: int,
    ):
        self._windows = {
            name: Windows(tokens[name], length, seed, number)
            for number, name in enumerate(sorted(tokens))
        }
        self._rows = rows
        self._parts: list[_Part] = []
        first, drawn = 0, dict.fromkeys(tokens, 0)
        for number, stage in enumerate(stages):
            names, shares = stage_shares(tokens, stage)
            part = _Part(first * rows, names, _Shares(shares, seed, number), dict(drawn))
            self._parts.append(part)
            # the first step that is no longer in this stage
            end = next((s for s in range(first, steps) if s / steps >= stage.until), steps)
            for name, count in zip(names, part.shares.counts((end - first) * rows), strict=True):
                drawn[name] += count
            first = end

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""
        row = step * self._rows
        part = next(part for part in reversed(self._parts) if part.first_row <= row)
        found = []
        for place in range(row - part.first_row, row - part.first_row + self._rows):
            file, count = part.shares.draw(place)
            name = part.names[file]
            found.append(self._windows[name].window(part.drawn[name] + count))
        return np.stack(found)


class Windows:
    """The windows of one file in the order in which they are drawn.

    Args:
        tokens: The token ids, with more than `length` of them.
        length: Number of tokens predicted in a window, which has one more.
        seed, number: Decide the order.
    """

    def __init__(self, tokens: Tokens, length: int, seed: int, number: int):
        self._tokens = tokens
        self._length = length
        self._seed = seed
        self._number = number
        # less than a window is left over at each end, wherever the first window begins
        self.count = max(1, (len(tokens) - length) // length)
        self._offsets = min(length, len(tokens) - self.count * length)

    def window(self, draw: int) -> np.ndarray:
        """The token ids of a draw, counted from 0, int32 `(length + 1,)`."""
        epoch, place = divmod(draw, self.count)
        key = np.array([self._seed, self._number, epoch], "<u8").tobytes()
        offset = keyed_order(0, self._offsets, key)
        start = offset + keyed_order(place, self.count, key) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


class _Part:
    """A stage: its first row, its files, their shares, and what earlier stages drew of every file."""

    def __init__(
        self, first_row: int, names: list[str], shares: "_Shares", drawn: Mapping[str, int]
    ):
        self.first_row = first_row
        self.names = names
        self.shares = shares
        self.drawn = drawn


class _Shares:
    """Which file gives each row, and how many rows it gave before.

    Args:
        shares: The share of each file.
        seed, stage: Decide the order.
    """

    def __init__(self, shares: np.ndarray, seed: int, stage: int):
        self._seed = seed
        self._stage = stage
        self._quotas = _quotas(shares)
        self._cycle = lru_cache(2)(self._drawn_cycle)

    def draw(self, row: int) -> tuple[int, int]:
        """The file of a row and the number of its rows before this one."""
        cycle, place = divmod(row, _CYCLE)
        files, counts = self._cycle(cycle)
        file = int(files[place])
        return file, cycle * int(self._quotas[file]) + int(counts[place])

    def counts(self, rows: int) -> list[int]:
        """How many of the first rows each file gives."""
        cycles, rest = divmod(rows, _CYCLE)
        files, _ = self._cycle(cycles)
        partial = np.bincount(files[:rest], minlength=len(self._quotas))
        return [int(count) for count in cycles * self._quotas + partial]

    def _drawn_cycle(self, cycle: int) -> tuple[np.ndarray, np.ndarray]:
        """The file of each row of a cycle, and the number of its rows before that one."""
        random = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([self._seed, self._stage, cycle]))
        )
        files = random.permutation(np.repeat(np.arange(len(self._quotas)), self._quotas))
        counts = np.empty(_CYCLE, np.int64)
        for file in range(len(self._quotas)):
            places = np.flatnonzero(files == file)
            counts[places] = np.arange(len(places))
        return files, counts


def _quotas(shares: np.ndarray) -> np.ndarray:
    """The rows of each file in a cycle: at least one, unless its share is 0."""
    quotas = np.where(shares > 0, np.maximum(1, np.floor(shares * _CYCLE)), 0).astype(np.int64)
    # what rounding left over goes to the files with the largest remainders
    for _ in range(_CYCLE - quotas.sum()):
        quotas[np.argmax(shares * _CYCLE - quotas)] += 1
    for _ in range(quotas.sum() - _CYCLE):
        quotas[np.argmax(quotas)] -= 1
    return quotas

"""Mixtures of token files: sequences cut at random offsets, or each once before any is repeated."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from ...files.stored_array import StoredArray

Tokens = np.ndarray | StoredArray
"""The token ids of a file, `(n,)`."""


@dataclass(frozen=True)
class Stage:
    """A part of a training run with its own mixture of files.

    Attributes:
        until: Fraction of all steps at which the stage ends.
        weights: Weight of each file, by its path. A file is drawn in proportion to weight times size.

    Example:
        >>> Stage(until=0.8, weights={"stories.txt": 3, "books.txt": 1}).until
        0.8
    """

    until: float
    weights: Mapping[str, float]


RANDOM, EPOCHS = ORDERS = ("random", "epochs")
"""The orders in which sequences can be drawn."""


class Mixture(Protocol):
    """The rows of each step of a run."""

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""


class RandomMixture:
    """Windows at random offsets, drawn anew for every row.

    Args:
        tokens: The token ids of each file, by its path.
        stages: The stages in order. The last ends at 1.
        seed: Seed of the draws.
        steps: Number of steps of the run.
        rows: Number of rows of a step.
        length: Number of tokens predicted in a row.
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
        self._tokens = tokens
        self._stages = stages
        self._seed = seed
        self._steps = steps
        self._rows = rows
        self._length = length

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""
        progress = step / self._steps
        stage = next(s for s in self._stages if progress < s.until)
        names, shares = stage_shares(self._tokens, stage)
        random = np.random.Generator(np.random.Philox(key=[self._seed, step]))
        rows = []
        for name in random.choice(len(names), self._rows, p=shares):
            tokens = self._tokens[names[name]]
            start = random.integers(0, len(tokens) - self._length)
            rows.append(tokens[start : start + self._length + 1].astype(np.int32))
        return np.stack(rows)


def stage_shares(tokens: Mapping[str, Tokens], stage: Stage) -> tuple[list[str], np.ndarray]:
    """The files of a stage and the share of rows that each of them gives."""
    names = list(stage.weights)
    sizes = np.array([len(tokens[name]) * stage.weights[name] for name in names])
    return names, sizes / sizes.sum()


_ROUNDS = 6


def keyed_order(index: int, count: int, key: bytes) -> int:
    r"""The number at an index of a pseudorandom order of :math:`0, …, n - 1`.

    A Feistel network (Luby and Rackoff, doi 10.1137/0217022) orders the numbers of an even number of
    bits. It is applied until the result is below :math:`n` (Black and Rogaway, doi
    10.1007/3-540-45760-7_9), which takes fewer than four times on average.

    Args:
        index: From 0 to `count - 1`.
        count: How many numbers there are.
        key: Up to 64 bytes, which decide the order.
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = 2**half_bits - 1
    number = index
    while True:
        left, right = number >> half_bits, number & mask
        for turn in range(_ROUNDS):
            message = bytes([turn]) + right.to_bytes(8, "little")
            digest = hashlib.blake2b(message, key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        number = left << half_bits | right
        if number < count:
            return number


_CYCLE = 2**16
"""Rows over which the shares of the files are exact, as nearly as whole numbers of rows allow."""


class EpochMixture:
    """Sequences without repetition: each file is cut into windows, which come in a shuffled order.

    When all windows of a file have been drawn, they are cut at other offsets and shuffled anew. Which
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

    @property
    def repeats_at_once(self) -> bool:
        """True if the first step holds a window twice, since a file has too few."""
        part = self._parts[0]
        counts = part.shares.counts(self._rows)
        return any(
            count > self._windows[name].count
            for name, count in zip(part.names, counts, strict=True)
        )

    def rows(self, step: int) -> np.ndarray:
        """The token ids of one step, int32 `(rows, length + 1)`."""
        row = step * self._rows
        part = next(part for part in reversed(self._parts) if part.first_row <= row)
        found = []
        for number in range(row - part.first_row, row - part.first_row + self._rows):
            file, count = part.shares.draw(number)
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
        epoch, index = divmod(draw, self.count)
        key = np.array([self._seed, self._number, epoch], "<u8").tobytes()
        offset = keyed_order(0, self._offsets, key)
        start = offset + keyed_order(index, self.count, key) * self._length
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
        cycle, index = divmod(row, _CYCLE)
        files, counts = self._cycle(cycle)
        file = int(files[index])
        return file, cycle * int(self._quotas[file]) + int(counts[index])

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
            indices = np.flatnonzero(files == file)
            counts[indices] = np.arange(len(indices))
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

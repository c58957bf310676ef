"""Batches of samples, in an order that depends only on the seed and the step."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, cast

import numpy as np

from ..errors import TrainingError
from .samples import Item, Sample

PADDED_TO = 32
"""The lengths of padded batches are multiples of this, so that few shapes are compiled."""


@dataclass(frozen=True)
class Batch:
    """Inputs and the targets that they should predict.

    Attributes:
        inputs: Token ids, int32 `(B, L)`.
        targets: The next token id of each input, int32 `(B, L)`.
        weights: 1 where the target is learned and 0 elsewhere, float32 `(B, L)`.
        valid: `False` where padded, bool `(B, L)`; `None` if nothing is padded.
        starts: `True` where a sample begins after another one, bool `(B, L)`; `None` if none does.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    valid: np.ndarray | None = None
    starts: np.ndarray | None = None

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Batch":
        """The batch of token rows `(B, L + 1)` that are learned as a whole."""
        return cls(rows[:, :-1], rows[:, 1:], np.ones(rows[:, 1:].shape, np.float32))

    def part(self, rows: slice) -> Self:
        """The batch of some of its rows."""
        arrays = {name: array for name, array in vars(self).items() if array is not None}
        return replace(self, **{name: array[rows] for name, array in arrays.items()})

    @property
    def tokens(self) -> int:
        """Number of learned tokens."""
        return int(self.weights.sum())

    @property
    def terms(self) -> int:
        """The number of summed losses: one for each learned token, unless a subclass says otherwise."""
        return self.tokens


def padded_batch(samples: Sequence[Sample], length: int | None = None) -> Batch:
    """A batch with one sample in each row, padded to `length` or to the longest sample, rounded up."""
    longest = max(sample.length for sample in samples) - 1
    length = -(-longest // PADDED_TO) * PADDED_TO if length is None else length
    return _filled_batch([[sample] for sample in samples], length, is_packed=False)


def packed_rows(samples: Sequence[Item], length: int) -> list[list[Item]]:
    """Packs samples into rows of at most `length` inputs, the longest first, by first fit."""
    rows: list[list[Item]] = []
    capacity: list[int] = []
    for sample in sorted(samples, key=lambda sample: -sample.length):
        needed = sample.length - 1
        index = next((n for n, left in enumerate(capacity) if left >= needed), None)
        if index is None:
            rows.append([])
            capacity.append(length)
            index = len(rows) - 1
        rows[index].append(sample)
        capacity[index] -= needed
    return rows


def evaluation_batches(
    samples: Sequence[Item],
    batch_size: int,
    limit: int = -1,
    seed: int = 0,
    make: Callable[[Sequence[Any]], Batch] = padded_batch,
) -> list[Batch]:
    """Batches with each sample once, one in each row, and samples of similar lengths together.

    Args:
        samples: The samples.
        batch_size: Number of samples in a batch.
        limit: Largest number of batches, which are drawn at random; -1 takes all.
        seed: Seed of the draw.
        make: Makes a batch of samples.

    Raises:
        TrainingError: There are no samples.
    """
    _check_samples(samples)
    in_order = sorted(samples, key=lambda sample: sample.length)
    starts = np.arange(0, len(in_order), batch_size)
    if limit != -1:
        random = np.random.Generator(np.random.Philox(key=[seed, 0]))
        starts = np.sort(random.permutation(starts)[:limit])
    return [make(in_order[start : start + batch_size]) for start in starts]


class SampleBatches(Generic[Item]):
    """The batch of samples of each step. Every epoch contains each sample at least once.

    Samples that are drawn at random, or rows of packed ones, fill the last batch of an epoch.

    Args:
        samples: The samples, or pairs of them.
        batch_size: Number of rows, or of pairs, in a batch.
        seed: Seed of the order.
        packed_length: Pack samples into rows of this many inputs; `None` pads one sample in each row,
            with samples of similar lengths together.
        shard: Rank of this process and number of processes. Each takes its own rows of every batch.
        make: Makes a batch of the samples of rows that are not packed.

    Raises:
        TrainingError: There are no samples.
    """

    _WINDOW = 1024

    def __init__(
        self,
        samples: Sequence[Item],
        batch_size: int,
        seed: int,
        packed_length: int | None = None,
        shard: tuple[int, int] = (0, 1),
        make: Callable[[Sequence[Any]], Batch] = padded_batch,
    ):
        _check_samples(samples)
        if batch_size < shard[1]:
            raise TrainingError(
                f"[data] 'batch_size' must be at least the number of processes, {shard[1]}, but got "
                f"{batch_size}."
            )
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._packed_length = packed_length
        self._shard = shard
        self._make = make
        self._epoch: tuple[int, list[list[list[Item]]]] = (-1, [])
        self._first_steps = [0]

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        while step >= self._first_steps[-1]:
            epoch_steps = len(self._batches(len(self._first_steps) - 1))
            self._first_steps.append(self._first_steps[-1] + epoch_steps)
        epoch = bisect_right(self._first_steps, step) - 1
        rank, size = self._shard
        rows = self._batches(epoch)[step - self._first_steps[epoch]]
        return self._batch_of(rows[rank::size])

    def epoch_steps(self) -> int:
        """The number of steps in the first epoch."""
        return len(self._batches(0))

    def _batch_of(self, rows: list[list[Item]]) -> Batch:
        if self._packed_length is not None:
            of_samples = cast("list[list[Sample]]", rows)
            return _filled_batch(of_samples, self._packed_length, is_packed=True)
        return self._make([sample for row in rows for sample in row])

    def _batches(self, epoch: int) -> list[list[list[Item]]]:
        """The rows of every batch of an epoch."""
        if self._epoch[0] == epoch:
            return self._epoch[1]
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        size, count = self._batch_size, len(self._samples)
        order = random.permutation(count)
        if self._packed_length is None:
            order = np.concatenate([order, _drawn(random, count, -count % size)])
        rows: list[list[Item]] = []
        for start in range(0, len(order), self._WINDOW):
            window = [self._samples[n] for n in order[start : start + self._WINDOW]]
            if self._packed_length is None:
                rows += [[s] for s in sorted(window, key=lambda sample: sample.length)]
            else:
                rows += packed_rows(window, self._packed_length)
        rows += [rows[n] for n in _drawn(random, len(rows), -len(rows) % size)]
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._epoch = epoch, [batches[n] for n in random.permutation(len(batches))]
        return self._epoch[1]


def _drawn(random: np.random.Generator, count: int, wanted: int) -> np.ndarray:
    """Numbers below `count` that fill the last batch of an epoch: each once before any is repeated."""
    return np.resize(random.permutation(count), wanted)


def _check_samples(samples: Sequence[Item]) -> None:
    if not samples:
        raise TrainingError(
            "[data] 'data' must hold at least one sample but has none with anything to learn."
        )


def _filled_batch(rows: Sequence[Sequence[Sample]], length: int, is_packed: bool) -> Batch:
    shape = (len(rows), length)
    inputs, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    weights, valid = np.zeros(shape, np.float32), np.zeros(shape, bool)
    starts = np.zeros(shape, bool)
    for row, samples in enumerate(rows):
        at = 0
        for sample in samples:
            size = sample.length - 1
            inputs[row, at : at + size] = sample.tokens[:-1]
            targets[row, at : at + size] = sample.tokens[1:]
            weights[row, at + max(sample.prompt - 1, 0) : at + size] = 1
            valid[row, at : at + size] = True
            starts[row, at] = at > 0
            at += size
    return Batch(
        inputs,
        targets,
        weights,
        None if valid.all() else valid,
        starts if is_packed and starts.any() else None,
    )

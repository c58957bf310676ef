"""Batches of samples, in an order that depends only on the seed and the step."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import TrainingError
from .samples import Sample

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

    @property
    def tokens(self) -> int:
        """Number of learned tokens."""
        return int(self.weights.sum())


def padded_batch(samples: Sequence[Sample], length: int | None = None) -> Batch:
    """A batch with one sample in each row, padded to `length` or to the longest sample, rounded up."""
    longest = max(len(sample.tokens) for sample in samples) - 1
    length = -(-longest // PADDED_TO) * PADDED_TO if length is None else length
    return _filled_batch([[sample] for sample in samples], length, is_packed=False)


def packed_rows(samples: Sequence[Sample], length: int) -> list[list[Sample]]:
    """Packs samples into rows of at most `length` inputs, the longest first, by first fit."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):
        needed = len(sample.tokens) - 1
        place = next((n for n, left in enumerate(room) if left >= needed), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(sample)
        room[place] -= needed
    return rows


def evaluation_batches(
    samples: Sequence[Sample], batch_size: int, limit: int = -1, seed: int = 0
) -> list[Batch]:
    """Batches with each sample once, one in each row, and samples of similar lengths together.

    Args:
        samples: The samples.
        batch_size: Number of rows in a batch.
        limit: Largest number of batches, which are drawn at random; -1 takes all.
        seed: Seed of the draw.

    Raises:
        TrainingError: There are no samples.
    """
    _check_samples(samples)
    in_order = sorted(samples, key=lambda sample: len(sample.tokens))
    starts = np.arange(0, len(in_order), batch_size)
    if limit != -1:
        random = np.random.Generator(np.random.Philox(key=[seed, 0]))
        starts = np.sort(random.permutation(starts)[:limit])
    return [padded_batch(in_order[start : start + batch_size]) for start in starts]


class SampleBatches:
    """The batch of samples of each step. Every epoch contains each sample at least once.

    Args:
        samples: The samples.
        batch_size: Number of rows in a batch.
        seed: Seed of the order.
        packed_length: Pack samples into rows of this many inputs; `None` pads one sample in each row,
            with samples of similar lengths together.
        shard: Rank of this process and number of processes. Each takes its own rows of every batch.

    Raises:
        TrainingError: There are no samples.
    """

    _WINDOW = 1024

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        seed: int,
        packed_length: int | None = None,
        shard: tuple[int, int] = (0, 1),
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
        self._epoch: tuple[int, list[list[list[Sample]]]] = (-1, [])
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

    def _batch_of(self, rows: list[list[Sample]]) -> Batch:
        if self._packed_length is not None:
            return _filled_batch(rows, self._packed_length, is_packed=True)
        return padded_batch([sample for row in rows for sample in row])

    def _batches(self, epoch: int) -> list[list[list[Sample]]]:
        """The rows of every batch of an epoch."""
        if self._epoch[0] == epoch:
            return self._epoch[1]
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        shuffled = [self._samples[n] for n in random.permutation(len(self._samples))]
        rows: list[list[Sample]] = []
        for start in range(0, len(shuffled), self._WINDOW):
            window = shuffled[start : start + self._WINDOW]
            if self._packed_length is None:
                rows += [[s] for s in sorted(window, key=lambda sample: len(sample.tokens))]
            else:
                rows += packed_rows(window, self._packed_length)
        size = self._batch_size
        # the first samples come again at the end of an epoch, to fill its last batch
        rows += [rows[n % len(rows)] for n in range(-len(rows) % size)]
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        self._epoch = epoch, [batches[n] for n in random.permutation(len(batches))]
        return self._epoch[1]


def _check_samples(samples: Sequence[Sample]) -> None:
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
            size = len(sample.tokens) - 1
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

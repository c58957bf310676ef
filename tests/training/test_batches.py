"""Batches of samples: masks, packing, order."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from mlx_mmfree.errors import TrainingError
from mlx_mmfree.training.batches import (
    PADDED_TO,
    Batch,
    SampleBatches,
    evaluation_batches,
    packed_rows,
    padded_batch,
)
from mlx_mmfree.training.samples import Sample


def _samples(lengths: Sequence[int], prompt: int = 0) -> list[Sample]:
    """Sample n holds the tokens 100 n, 100 n + 1, ..."""
    return [
        Sample(np.arange(100 * n, 100 * n + length, dtype=np.int32), prompt)
        for n, length in enumerate(lengths, 1)
    ]


def _first_tokens(batch: Batch) -> list[int]:
    """The sample that each row begins with."""
    return [int(row[0]) // 100 for row in batch.inputs]


def test_rows_are_padded_and_masked() -> None:
    batch = padded_batch(_samples([5, 3], prompt=2))
    assert batch.inputs.shape == (2, PADDED_TO)
    assert batch.inputs[0, :5].tolist() == [100, 101, 102, 103, 0]
    assert batch.targets[0, :4].tolist() == [101, 102, 103, 104]
    # the last token of the prompt predicts the first one that is learned
    assert batch.weights[:, :6].tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.valid is not None and batch.valid.sum(axis=1).tolist() == [4, 2]
    assert batch.starts is None and batch.tokens == 4


def test_rows_without_padding_have_no_mask() -> None:
    batch = padded_batch(_samples([PADDED_TO + 1] * 2))
    assert batch.valid is None and batch.tokens == 2 * PADDED_TO


def test_packed_samples_fill_rows_and_are_marked() -> None:
    [row] = packed_rows(_samples([5, 9, 4]), 16)
    assert [len(sample.tokens) for sample in row] == [9, 5, 4]
    batch = SampleBatches(_samples([5, 9, 4]), 1, 0, packed_length=16).batch(0)
    assert batch.inputs.shape == (1, 16)
    assert batch.starts is not None and batch.starts[0].nonzero()[0].tolist() == [8, 12]
    assert batch.inputs[0, 8] == 100 and batch.targets[0, 7] == 208
    assert batch.valid is not None and batch.valid[0].sum() == 15 == batch.tokens


def test_packing_loses_nothing_and_never_overflows() -> None:
    random = np.random.default_rng(0)
    samples = _samples(random.integers(2, 33, 200).tolist())
    rows = packed_rows(samples, 32)
    assert Counter(id(s) for row in rows for s in row) == Counter(map(id, samples))
    sizes = [sum(len(s.tokens) - 1 for s in row) for row in rows]
    assert max(sizes) <= 32 and sum(sizes) / (32 * len(rows)) > 0.9


@pytest.mark.parametrize("packed_length", [None, 40])
def test_an_epoch_has_each_sample_once(packed_length: int | None) -> None:
    samples = _samples(np.random.default_rng(1).integers(2, 40, 24).tolist())
    schedule = SampleBatches(samples, 4, seed=3, packed_length=packed_length)
    seen: Counter[int] = Counter()
    for step in range(schedule.epoch_steps()):
        batch = schedule.batch(step)
        learned = batch.weights.astype(bool)
        seen.update((batch.targets[learned] // 100).tolist())
    for n, sample in enumerate(samples, 1):
        whole = len(sample.tokens) - 1
        # the rows that fill the last batch are there twice
        assert seen[n] in ((whole,) if packed_length is None else (whole, 2 * whole))


@pytest.mark.parametrize(
    ("lengths", "size", "packed_length", "chance"),
    [
        ([2, 3, 4, 5, 40], 4, None, 3 / 5),
        ([2, 3, 4, 5, 6, 40], 5, None, 4 / 6),
        ([9, 9, 9, 9, 40], 3, None, 1 / 5),
        # of two rows, one holds three samples
        ([40, 9, 9, 9], 3, 39, 1 / 2),
        ([40, 30, 20], 4, 39, 1 / 3),
    ],
)
def test_each_sample_is_as_likely_to_fill_the_last_batch(
    lengths: list[int], size: int, packed_length: int | None, chance: float
) -> None:
    samples = _samples(lengths)
    schedule = SampleBatches(samples, size, seed=0, packed_length=packed_length)
    epochs, steps = 400, schedule.epoch_steps()
    seen: Counter[int] = Counter()
    for step in range(epochs * steps):
        batch = schedule.batch(step)
        seen.update((batch.targets[batch.weights.astype(bool)] // 100).tolist())
    longest = lengths.index(40)
    drawn = seen[longest + 1] / 39 - epochs
    # within five standard deviations of a binomial distribution
    assert abs(drawn - epochs * chance) < 5 * (epochs * chance * (1 - chance)) ** 0.5
    assert sum(seen.values()) >= epochs * (sum(lengths) - len(lengths))


def test_order_depends_on_seed_and_step_alone() -> None:
    samples = _samples(np.random.default_rng(2).integers(2, 40, 50).tolist())
    want = [SampleBatches(samples, 4, seed=1).batch(step).inputs for step in range(40)]
    schedule = SampleBatches(samples, 4, seed=1)
    for step in (39, 0, 13, 14, 2):
        assert np.array_equal(schedule.batch(step).inputs, want[step])
    others = [SampleBatches(samples, 4, seed=2).batch(step).inputs for step in range(13)]
    assert not all(map(np.array_equal, others, want))
    assert not all(map(np.array_equal, want[13:26], want[:13]))


def test_similar_lengths_come_together() -> None:
    samples = _samples(np.random.default_rng(3).integers(2, 400, 400).tolist())
    schedule = SampleBatches(samples, 8, seed=0)
    batches = [schedule.batch(step) for step in range(schedule.epoch_steps())]
    used = sum(batch.tokens for batch in batches) / sum(batch.inputs.size for batch in batches)
    assert used > 0.9
    shapes = [batch.inputs.shape[1] for batch in batches]
    assert shapes != sorted(shapes)


def test_processes_share_a_batch() -> None:
    samples = _samples([9] * 8)
    whole = SampleBatches(samples, 4, seed=0)
    parts = [SampleBatches(samples, 4, seed=0, shard=(rank, 2)) for rank in range(2)]
    for step in range(5):
        rows = [row for part in parts for row in _first_tokens(part.batch(step))]
        assert sorted(rows) == sorted(_first_tokens(whole.batch(step)))
    with pytest.raises(
        TrainingError, match="'batch_size' must be at least the number of processes"
    ):
        SampleBatches(samples, 1, seed=0, shard=(0, 2))


def test_one_sample_fills_a_batch() -> None:
    schedule = SampleBatches(_samples([5]), 4, seed=0)
    assert schedule.epoch_steps() == 1
    assert _first_tokens(schedule.batch(7)) == [1] * 4


def test_no_samples_are_refused() -> None:
    for make in (lambda: SampleBatches([], 4, 0), lambda: evaluation_batches([], 4)):
        with pytest.raises(TrainingError, match="at least one sample"):
            make()


def test_evaluation_takes_each_sample_once() -> None:
    samples = _samples(np.random.default_rng(4).integers(2, 90, 22).tolist())
    batches = evaluation_batches(samples, 4)
    assert sorted(n for batch in batches for n in _first_tokens(batch)) == list(range(1, 23))
    some = evaluation_batches(samples, 4, limit=3, seed=5)
    assert len(some) == 3
    again = evaluation_batches(samples, 4, limit=3, seed=5)
    assert [_first_tokens(b) for b in some] == [_first_tokens(b) for b in again]

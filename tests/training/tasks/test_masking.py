"""Which tokens are masked, and with what."""

import numpy as np
import pytest

from mlx_mmfree.training.tasks.corpus import Masking, masked_count

MASK, END, VOCABULARY = 1, 0, 500


def _batch(rows: np.ndarray, seed: int = 0, probability: float = 0.15):
    masking = Masking(MASK, [END, MASK], VOCABULARY, probability)
    return masking.batch(rows, np.random.default_rng(seed))


def _rows(count: int, length: int) -> np.ndarray:
    return np.random.default_rng(9).integers(2, VOCABULARY, (count, length), dtype=np.int32)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (5, 1), (40, 6), (128, 19)])
def test_so_many_of_each_row(length: int, count: int) -> None:
    rows = _rows(7, length)
    batch = _batch(rows)
    assert masked_count(length, 0.15) == count
    assert batch.positions.shape == batch.targets.shape == batch.weights.shape == (7, count)
    assert (np.diff(batch.positions, axis=1) > 0).all() and batch.tokens == 7 * count
    assert (np.take_along_axis(rows, batch.positions, axis=1) == batch.targets).all()
    others = np.ones(rows.shape, bool)
    np.put_along_axis(others, batch.positions, False, axis=1)
    assert (batch.inputs == rows)[others].all()


def test_eighty_ten_ten() -> None:
    rows = _rows(400, 200)
    batch = _batch(rows)
    shown = np.take_along_axis(batch.inputs, batch.positions, axis=1)
    is_mask, is_same = shown == MASK, shown == batch.targets
    # 12,000 draws: four standard deviations of a share are at most 0.015
    assert is_mask.mean() == pytest.approx(0.8, abs=0.015)
    assert is_same.mean() == pytest.approx(0.1 + 0.1 / 498, abs=0.011)
    others = shown[~is_mask & ~is_same]
    assert others.min() >= 2 and len(np.unique(others)) > 400
    # each position is as likely as any other
    counts = np.bincount(batch.positions.reshape(-1), minlength=200)
    assert counts.min() > 25 and counts.max() < 100


def test_special_tokens_stay() -> None:
    rows = _rows(50, 20)
    rows[:, ::2] = END
    rows[0] = END
    rows[1] = END
    rows[1, 3] = 7
    batch = _batch(rows, probability=0.6)
    assert batch.tokens == 12 + 1 + 48 * 10
    assert not (batch.targets[2:][batch.weights[2:] == 1] == END).any()
    assert (batch.inputs[2:][rows[2:] == END] == END).all()


def test_the_draw_decides() -> None:
    rows = _rows(5, 30)
    first, again, other = (_batch(rows, seed) for seed in (3, 3, 4))
    assert (first.inputs == again.inputs).all() and (first.positions == again.positions).all()
    assert not (first.positions == other.positions).all()

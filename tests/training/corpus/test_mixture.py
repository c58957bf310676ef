"""The rows of both mixtures: they follow from the seed and the step, and from weights and stages."""

from typing import Any

import numpy as np
import pytest

from mlx_mmfree.training.corpus.mixture import EpochMixture, RandomMixture, Stage, Windows

TOKENS = {
    "low": np.arange(1000, dtype=np.uint16),
    "high": np.arange(70_000, 70_500, dtype=np.uint32),
}
STAGES = (Stage(0.5, {"low": 1, "high": 6}), Stage(1, {"low": 1}))
both = pytest.mark.parametrize("kind", [RandomMixture, EpochMixture])


def _mixture(kind: Any, seed: int = 0, steps: int = 10, rows: int = 4, length: int = 8) -> Any:
    return kind(TOKENS, STAGES, seed, steps=steps, rows=rows, length=length)


@both
def test_rows_depend_on_seed_and_step_alone(kind: Any) -> None:
    first = _mixture(kind).rows(3)
    used = _mixture(kind)
    for step in (9, 1, 7):
        used.rows(step)
    assert np.array_equal(used.rows(3), first)
    assert not np.array_equal(_mixture(kind).rows(4), first)
    assert not np.array_equal(_mixture(kind, seed=1).rows(3), first)


@both
def test_rows_are_windows_of_the_files(kind: Any) -> None:
    rows = _mixture(kind, rows=16).rows(0)
    assert rows.shape == (16, 9) and rows.dtype == np.int32
    assert (np.diff(rows, axis=1) == 1).all()


@both
def test_mixture_follows_sizes_weights_and_stages(kind: Any) -> None:
    mixture = _mixture(kind, rows=4000, length=4)
    assert (mixture.rows(0)[:, 0] >= 70_000).mean() == pytest.approx(0.75, abs=0.03)
    assert (mixture.rows(5) < 1000).all()


def test_random_rows_are_those_of_earlier_versions() -> None:
    rows = _mixture(RandomMixture).rows(3)
    assert rows[:, 0].tolist() == [70_399, 70_047, 70_199, 70_022]


def test_no_window_comes_twice_in_an_epoch() -> None:
    for size in (9, 10, 17, 24, 100, 1003):
        windows = Windows(np.arange(size), 8, seed=1, number=0)
        for epoch in range(3):
            draws = range(epoch * windows.count, (epoch + 1) * windows.count)
            starts = sorted(int(windows.window(draw)[0]) for draw in draws)
            assert set(np.diff(starts)) <= {8}
            # less than a window is left over at either end
            assert starts[0] < 8 and size - starts[-1] < 9 + 8
            assert all(len(windows.window(draw)) == 9 for draw in draws)


def test_epochs_begin_at_other_offsets() -> None:
    windows = Windows(np.arange(1003), 8, seed=1, number=0)
    starts = {int(windows.window(epoch * windows.count)[0]) % 8 for epoch in range(20)}
    assert len(starts) > 3


@pytest.mark.parametrize("cycle", [16, 2**16])
def test_stages_go_on_where_the_stage_before_them_was(
    monkeypatch: pytest.MonkeyPatch, cycle: int
) -> None:
    monkeypatch.setattr("mlx_mmfree.training.corpus.mixture._CYCLE", cycle)
    tokens = {"a": np.arange(801), "b": np.arange(1000, 1401)}
    stages = (Stage(0.25, {"a": 1, "b": 2}), Stage(0.5, {"b": 1}), Stage(1, {"a": 2, "b": 1}))
    mixture = EpochMixture(tokens, stages, 3, steps=40, rows=4, length=8)
    drawn = np.concatenate([mixture.rows(step) for step in range(40)])[:, 0]
    for low, name in ((0, "a"), (1000, "b")):
        windows = Windows(tokens[name], 8, 3, sorted(tokens).index(name))
        own = drawn[(drawn >= low) & (drawn < low + 1000)]
        assert own.tolist() == [int(windows.window(n)[0]) for n in range(len(own))]
    assert (drawn[40:80] >= 1000).all()


def test_small_shares_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_mmfree.training.corpus.mixture._CYCLE", 64)
    tokens = {name: np.full(1000, n) for n, name in enumerate("abcd")}
    stages = (Stage(1, {"a": 1e6, "b": 1, "c": 0, "d": 5e5}),)
    mixture = EpochMixture(tokens, stages, 0, steps=1, rows=64, length=8)
    assert np.bincount(mixture.rows(0)[:, 0], minlength=4).tolist() == [42, 1, 0, 21]

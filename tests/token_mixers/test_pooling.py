"""Pooling: against its definition and PyTorch's average pooling, and over packed samples."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.token_mixers import Pooling
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.interop
@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 100])
def test_a_window_on_both_sides_as_in_torch(window: int, length: int) -> None:
    import torch

    x = mx.random.normal((2, length, 8), key=mx.random.key(1))
    rows = torch.tensor(np.array(x)).transpose(1, 2)
    pooled = torch.nn.functional.avg_pool1d(
        rows, window, stride=1, padding=window // 2, count_include_pad=False
    )
    want = mx.array((pooled - rows).transpose(1, 2).numpy())
    got = Pooling(8, window=window, is_causal=False)(x)[0]
    assert mx.abs(got - want).max().item() <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("length", [1, 5, 100])
def test_a_window_on_both_sides(window: int, length: int) -> None:
    x = mx.random.normal((2, length, 8), key=mx.random.key(1))
    rows, half = np.array(x, np.float64), window // 2
    pooled = [rows[:, max(0, n - half) : n + half + 1].mean(axis=1) for n in range(length)]
    want = mx.array((np.stack(pooled, axis=1) - rows).astype(np.float32))
    got = Pooling(8, window=window, is_causal=False)(x)[0]
    assert mx.abs(got - want).max().item() <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("window", [None, 1, 4])
def test_the_last_tokens(window: int | None) -> None:
    x = mx.random.normal((2, 9, 8), key=mx.random.key(1))
    rows = np.array(x, np.float64)
    want = np.stack(
        [
            rows[:, 0 if window is None else max(0, n + 1 - window) : n + 1].mean(axis=1)
            - rows[:, n]
            for n in range(9)
        ],
        axis=1,
    )
    got = Pooling(8, window=window)(x)[0]
    assert mx.abs(got - mx.array(want)).max().item() <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("window", [None, 3])
def test_samples_of_a_row_are_pooled_apart(window: int | None) -> None:
    mixer = Pooling(8, window=window, is_causal=False)
    x = mx.random.normal((1, 9, 8), key=mx.random.key(1))
    starts = mx.array([[True, False, False, False, True, True, False, False, False]])
    valid = mx.arange(9)[None] != 6
    got, _ = mixer(x, None, valid, starts=starts)
    real = mx.array([0, 1, 2, 3, 4, 5, 7, 8])
    want = mx.concatenate([mixer(part)[0] for part in mx.split(x[:, real], [4, 5], axis=1)], axis=1)
    assert relative_error(got[:, real], want) <= TOLERANCE[mx.float32]


def test_a_window_without_a_middle_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[Pooling\] 'window' must be odd"):
        Pooling(8, window=4, is_causal=False)

"""Samples that share a row do not see each other, for every mixer that packs them."""

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_mmfree.layers.mixer import TokenMixer
from tests.token_mixers.contract.cases import (
    DIMS,
    LENGTH,
    PACKING,
    Case,
    assert_equal,
    by_case,
    continue_equally,
    rounds_keys,
    sequence,
)
from tests.tolerances import GRADIENT_TOLERANCE, relative_error

# the samples of each row; what remains of the positions is padding
SAMPLES = [[3, 11, 2], [9, 5], [16]]
POSITIONS = 16


@cache
def _starts_and_valid(is_carried: bool) -> tuple[mx.array, mx.array]:
    """Where samples start, and what is no padding. A carried state goes on with the first sample."""
    starts, valid = np.zeros((3, POSITIONS), bool), np.zeros((3, POSITIONS), bool)
    for row, lengths in enumerate(SAMPLES):
        starts[row, np.cumsum(lengths if is_carried else [0, *lengths])[:-1]] = True
        valid[row, : sum(lengths)] = True
    return mx.array(starts), mx.array(valid)


def _alone(mixer: TokenMixer, x: mx.array, before: object) -> tuple[mx.array, list[object]]:
    """Each sample in a call of its own; the states are those after the last sample of each row."""
    rows, states = [], []
    for row, lengths in enumerate(SAMPLES):
        state, parts = tree_map(lambda a, row=row: a[row : row + 1], before), []
        chunks = mx.split(x[row : row + 1], np.cumsum(lengths).tolist(), axis=1)
        for n, part in enumerate(chunks):
            if n < len(lengths):
                y, state = mixer(part, state if n == 0 else None)
                parts.append(y)
            else:
                parts.append(mx.zeros_like(part))
        rows.append(mx.concatenate(parts, axis=1))
        states.append(state)
    return mx.concatenate(rows), states


@pytest.mark.parametrize("is_carried", [False, True], ids=["fresh", "carried"])
@by_case(PACKING)
def test_packed_samples_equal_each_alone(case: Case, is_carried: bool) -> None:
    mixer, x = case.mixer, mx.random.normal((3, POSITIONS, DIMS), key=mx.random.key(8))
    before = mixer(sequence(5))[1] if is_carried else mixer.init_state(3, x.dtype)
    starts, valid = _starts_and_valid(is_carried)
    shown = valid[..., None]
    weights = mx.where(shown, mx.cos(mx.arange(x.size)).reshape(x.shape), 0.0)

    def packed(x: mx.array) -> tuple[mx.array, mx.array, object]:
        y, state = mixer(x, before, valid, starts=starts)
        y = mx.where(shown, y, 0.0)
        return (y * weights).sum(), y, state

    def alone(x: mx.array) -> tuple[mx.array, mx.array, list[object]]:
        y, states = _alone(mixer, x, before)
        return (y * weights).sum(), y, states

    if rounds_keys(case):
        (_, got, state), (_, want, states) = packed(x), alone(x)
    else:
        (_, got, state), gradient = mx.value_and_grad(packed)(x)
        (_, want, states), want_gradient = mx.value_and_grad(alone)(x)
        assert relative_error(gradient, want_gradient) <= GRADIENT_TOLERANCE
    assert_equal(got, want)
    for row, last in enumerate(states):
        own = tree_map(lambda a, row=row: a[row : row + 1], state)
        if mixer.recurrent:
            assert_equal(own, last)
        continue_equally(mixer, x[row : row + 1], own, last)


@by_case(PACKING)
def test_padding_starts_no_sample(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    valid = mx.broadcast_to(mx.arange(LENGTH) % 5 != 3, x.shape[:2])
    got, state = mixer(x, None, valid, starts=~valid)
    want, want_state = mixer(x, None, valid)
    shown = valid[..., None]
    assert_equal(mx.where(shown, got, 0.0), mx.where(shown, want, 0.0))
    continue_equally(mixer, x, state, want_state)

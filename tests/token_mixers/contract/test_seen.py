"""Positions that each position sees and does not see, for every mixer found in the package."""

import mlx.core as mx
import numpy as np
import pytest

from tests.token_mixers.contract.cases import (
    CAUSAL,
    CROSS,
    DIMS,
    LENGTH,
    WHOLE,
    Case,
    assert_equal,
    beside,
    by_case,
    continue_equally,
    sequence,
)


@pytest.mark.equal_bits
@by_case(CAUSAL)
def test_output_depends_on_the_past_only(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    changed = mx.concatenate([x[:, :6], x[:, 6:] + 1.0], axis=1)
    got, want = mixer(changed)[0][:, :6], mixer(x)[0][:, :6]
    if getattr(mixer, "is_exact", True):
        assert mx.array_equal(got, want)
    else:
        # later tokens change where earlier ones stand in products, which then round otherwise
        assert_equal(got, want)


# where four positions of padding stand before, within and after the tokens of a row
PADDING = [[0, 1, 2, 3], [0, 5, 6, 16], [13, 14, 15, 16]]


def padded(x: mx.array, before: int = 0) -> tuple[mx.array, mx.array, mx.array]:
    """Rows with padding, which positions are none, and the position of each token, `(3, LENGTH, 1)`."""
    valid = np.ones((3, LENGTH + 4), bool)
    for row, positions in zip(valid, PADDING[before:] + PADDING[:before], strict=True):
        row[positions] = False
    rows = np.full((*valid.shape, DIMS), 9.0, np.float32)
    rows[valid] = np.array(x).reshape(-1, DIMS)
    positions = np.stack([np.flatnonzero(row) for row in valid])[..., None]
    return mx.array(rows), mx.array(valid), mx.array(positions)


@pytest.mark.parametrize("is_carried", [False, True], ids=["fresh", "carried"])
@by_case(CAUSAL)
def test_padding_changes_nothing(case: Case, is_carried: bool) -> None:
    mixer, x = case.mixer, sequence()
    before = mixer(sequence(5, seed=4))[1] if is_carried else None
    want, want_state = mixer(x, before)
    for turn in range(3):
        rows, valid, positions = padded(x, turn)
        y, state = mixer(rows, before, valid)
        assert_equal(mx.take_along_axis(y, positions, axis=1), want)
        if mixer.recurrent:
            assert_equal(state, want_state)
        continue_equally(mixer, x, state, want_state)


@by_case(CAUSAL)
def test_a_padded_step_leaves_the_recurrence(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    _, state = mixer(x)
    for length in (1, 2):
        _, after = mixer(x[:, :length], state, mx.zeros((3, length), mx.bool_))
        if mixer.recurrent:
            assert_equal(after, state)
        continue_equally(mixer, x, after, state)


@by_case([each for each in WHOLE if set(each.values[0].options) <= {"is_causal"}])
def test_every_position_sees_the_whole_sequence(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    assert not mixer.is_causal
    changed = mx.concatenate([x[:, :-1], x[:, -1:] + 1.0], axis=1)
    assert not mx.array_equal(mixer(changed)[0][:, 0], mixer(x)[0][:, 0])


@by_case(WHOLE)
def test_padding_around_a_sequence_changes_nothing(case: Case) -> None:
    mixer, x, total = case.mixer, sequence(), LENGTH + 4
    want, position = mixer(x)[0], mx.arange(total)
    for before in (0, 2, 4):
        padded = mx.pad(x, [(0, 0), (before, 4 - before), (0, 0)], constant_values=9.0)
        valid = mx.broadcast_to((position >= before) & (position < before + LENGTH), (3, total))
        y, _ = mixer(padded, None, valid)
        assert_equal(y[:, before : before + LENGTH], want)


@by_case(WHOLE)
def test_rows_do_not_see_each_other(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    assert_equal(mixer(x[1:2])[0], mixer(x)[0][1:2])


@by_case(CROSS)
def test_the_second_sequence_is_seen_but_for_its_padding(case: Case) -> None:
    mixer, x = case.mixer, sequence()
    memory = beside(mixer)["memory"]
    y, _ = mixer(x, memory=memory)
    assert not mx.array_equal(mixer(x, memory=memory + 1.0)[0], y)
    padded = mx.concatenate([memory, mx.full((3, 2, DIMS), 9.0)], axis=1)
    valid = mx.broadcast_to(mx.arange(9) < 7, (3, 9))
    assert_equal(mixer(x, memory=padded, memory_valid=valid)[0], y)

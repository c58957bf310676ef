"""Grouped-query attention: padding of every kind, windows, growth, what is refused."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.key_value_state import GROWTH_STEP
from mlx_mmfree.token_mixers import GQA
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
WINDOWS: list[dict[str, int]] = [
    {},
    {"window": 3},
    {"window": 100},
    {"window": 3, "sinks": 2},
    {"window": 1, "sinks": 1},
]


def _mixer(**options: Any) -> GQA:
    mx.random.seed(5)
    return GQA(16, num_heads=4, num_kv_heads=2, rope=RoPE(4), **options)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3], [4, 9]], ids=str)
def test_rows_with_padding_anywhere_equal_their_tokens_alone(
    window: dict[str, int], cuts: list[int]
) -> None:
    mixer = _mixer(**window)
    x = mx.random.normal((5, 14, 16))
    valid = mx.random.uniform(shape=(5, 14)) < mx.array([0.2, 0.5, 0.8, 1.0, -1.0])[:, None]
    state, parts = None, []
    for part, mask in zip(mx.split(x, cuts, axis=1), mx.split(valid, cuts, axis=1), strict=True):
        y, state = mixer(part, state, mask)
        parts.append(y)
    y = mx.concatenate(parts, axis=1)
    after, _ = mixer(x[:, :3], state)
    for row, mask in enumerate(valid.tolist()):
        kept = mx.array([n for n, is_real in enumerate(mask) if is_real], mx.int32)
        tokens = mx.concatenate([x[row, kept], x[row, :3]])[None]
        want, _ = mixer(tokens)
        assert relative_error(y[row, kept], want[0, :-3]) <= FLOAT32
        assert relative_error(after[row], want[0, -3:]) <= FLOAT32
    assert mx.isfinite(y).all().item()


def test_not_a_number_in_padding_stays_there() -> None:
    mixer = _mixer()
    x = mx.random.normal((1, 6, 16))
    valid = mx.array([[False, True, False, True, True, False]])
    broken = mx.where(valid[..., None], x, float("nan"))
    y, state = mixer(broken, None, valid)
    assert mx.array_equal(y, mixer(x, None, valid)[0])
    assert mx.isfinite(mixer(x, state)[0]).all().item()


@pytest.mark.parametrize("window", [None, 3])
def test_bidirectional_attention_skips_padding(window: int | None) -> None:
    mixer = _mixer(is_causal=False, window=window)
    x = mx.random.normal((2, 7, 16))
    valid = mx.array([[False] * 3 + [True] * 4, [True] * 5 + [False] * 2])
    y, state = mixer(x, None, valid)
    assert state == ()
    assert relative_error(y[0, 3:], mixer(x[:1, 3:])[0][0]) <= FLOAT32
    assert relative_error(y[1, :5], mixer(x[1:, :5])[0][0]) <= FLOAT32
    changed = mx.concatenate([x[:, :6], x[:, 6:] + 1], axis=1)
    sees_the_end = mx.any(mixer(changed)[0][:, 0] != mixer(x)[0][:, 0]).item()
    assert sees_the_end == (window is None)


@pytest.mark.parametrize("window", [None, GROWTH_STEP - 7])
def test_buffers_grow_in_steps_up_to_the_window(window: int | None) -> None:
    mixer = _mixer(window=window)
    x = mx.random.normal((1, GROWTH_STEP + 4, 16))
    whole, _ = mixer(x)
    state, rooms = mixer.init_state(1, mx.float32), set()
    for start in range(0, x.shape[1], 20):
        y, state = mixer(x[:, start : start + 20], state)
        assert relative_error(y, whole[:, start : start + 20]) <= FLOAT32
        rooms.add(state.keys.shape[2])
    assert rooms == ({GROWTH_STEP, 2 * GROWTH_STEP} if window is None else {window})


def test_positions_of_a_full_window_rotate() -> None:
    mixer = _mixer(window=4)
    _, state = mixer(mx.zeros((1, 6, 16)))
    assert state.positions.tolist() == [[4, 5, 2, 3]]
    _, state = mixer(mx.zeros((1, 1, 16)), state)
    assert state.positions.tolist() == [[4, 5, 6, 3]]
    _, state = mixer(mx.zeros((1, 5, 16)), state)
    assert state.positions.tolist() == [[8, 9, 10, 11]]


@pytest.mark.parametrize("window", [{}, {"window": 5}, {"window": 3, "sinks": 2}], ids=str)
def test_rows_of_different_lengths_step_on(window: dict[str, int]) -> None:
    mixer = _mixer(**window)
    x = mx.random.normal((2, 9, 16))
    valid = mx.array([[False] * 7 + [True] * 2, [True] * 9])
    _, state = mixer(x, None, valid)
    rows = [x[0, 7:], x[1]]
    for _ in range(8):
        step = mx.random.normal((2, 1, 16))
        y, state = mixer(step, state)
        rows = [mx.concatenate([row, new]) for row, new in zip(rows, step, strict=True)]
        for row, got in zip(rows, y, strict=True):
            assert relative_error(got[0], mixer(row[None])[0][0, -1]) <= FLOAT32


def test_sinks_keep_their_slots() -> None:
    mixer = _mixer(window=3, sinks=2)
    _, state = mixer(mx.zeros((1, 4, 16)))
    assert state.positions.tolist() == [[0, 1, 2, 3]]
    _, state = mixer(mx.zeros((1, 4, 16)), state)
    assert state.positions.tolist() == [[0, 1, 5, 6, 7]]
    _, state = mixer(mx.zeros((1, 1, 16)), state)
    assert state.positions.tolist() == [[0, 1, 8, 6, 7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4, "sinks": 1}, "'sinks' must be 0, or positive with 'is_causal'"),
        ({"num_heads": 4, "sinks": -1, "window": 2}, "'sinks' must be 0, or positive"),
        (
            {"num_heads": 4, "sinks": 1, "window": 2, "is_causal": False},
            "'sinks' must be 0, or positive with 'is_causal'",
        ),
        ({"num_heads": 5}, "'num_heads' must divide 'dims'"),
        ({"num_heads": 0, "head_dim": 4}, "'num_heads' must divide 'dims'"),
        ({"num_heads": 4, "num_kv_heads": 3}, "'num_kv_heads' must divide 'num_heads'"),
        ({"num_heads": 4, "window": 0}, "'window' must be positive"),
        ({"num_heads": 4, "head_dim": -4}, "'head_dim' must be positive"),
    ],
)
def test_impossible_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GQA(16, **options)

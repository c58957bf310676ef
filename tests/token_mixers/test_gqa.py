"""Grouped-query attention: padding of every kind, windows, growth, what is refused."""

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlx_mmfree.layers import RoPE
from mlx_mmfree.layers.attention.key_values import GROWTH_STEP
from mlx_mmfree.layers.context import Context
from mlx_mmfree.layers.quantization import Quantization
from mlx_mmfree.token_mixers import GQA, KeyValueCache
from tests.tolerances import TOLERANCE, relative_error

FLOAT32 = TOLERANCE[mx.float32]
WINDOWS: list[dict[str, int]] = [
    {},
    {"window": 3},
    {"window": 100},
    {"window": 3, "sinks": 2},
    {"window": 1, "sinks": 1},
]


def _mixer(is_causal: bool = True, **cache: Any) -> GQA:
    mx.random.seed(5)
    cache_of = KeyValueCache(**cache)
    return GQA(16, num_heads=4, num_kv_heads=2, rope=RoPE(4), is_causal=is_causal, cache=cache_of)


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
        real = mx.array([n for n, is_real in enumerate(mask) if is_real], mx.int32)
        tokens = mx.concatenate([x[row, real], x[row, :3]])[None]
        want, _ = mixer(tokens)
        assert relative_error(y[row, real], want[0, :-3]) <= FLOAT32
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
    state, capacities = mixer.init_state(1, mx.float32), set()
    for start in range(0, x.shape[1], 20):
        y, state = mixer(x[:, start : start + 20], state)
        assert relative_error(y, whole[:, start : start + 20]) <= FLOAT32
        capacities.add(state.keys.shape[2])
    assert capacities == ({GROWTH_STEP, 2 * GROWTH_STEP} if window is None else {window})


@pytest.mark.parametrize("window", [None, GROWTH_STEP, 7])
def test_a_fixed_state_keeps_its_shapes(window: int | None) -> None:
    mixer = _mixer(window=window)
    _, state = mixer(mx.random.normal((2, 5, 16)))
    fixed, capacity = mixer.state_kind.fixed(state)
    assert capacity == {None: GROWTH_STEP - 5, GROWTH_STEP: None, 7: None}[window]
    shapes = [x.shape for x in fixed]
    for left in range(12, 0, -1):
        x = mx.random.normal((2, 1, 16))
        y, fixed = mixer(x, fixed)
        want, state = mixer(x, state)
        assert relative_error(y, want) <= FLOAT32
        assert [x.shape for x in fixed] == shapes
        ordinary = mixer.state_kind.growing(fixed, capacity and capacity - 13 + left)
        slots = state.positions.shape[1]
        assert mx.array_equal(ordinary.positions[:, :slots], state.positions)
        assert window or ordinary.positions.shape == state.positions.shape


@pytest.mark.parametrize("window", [{}, {"window": 7}], ids=str)
@pytest.mark.parametrize("steps", [1, 9])
def test_several_tokens_follow_a_fixed_state(window: dict[str, int], steps: int) -> None:
    mixer = _mixer(**window)
    x = mx.random.normal((1, 9 + steps, 16))
    want, _ = mixer(x)
    _, state = mixer(x[:, :4])
    state, capacity = mixer.state_kind.fixed(state)
    for n in range(4, 4 + steps):
        _, state = mixer(x[:, n : n + 1], state)
    state = mixer.state_kind.growing(state, capacity and capacity - steps)
    y, _ = mixer(x[:, 4 + steps :], state)
    assert relative_error(y, want[:, 4 + steps :]) <= FLOAT32


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_read_into_a_fixed_state_and_taken_back(batch: int) -> None:
    mixer, x = _mixer(), mx.random.normal((batch, 12, 16))
    valid = mx.arange(6) >= mx.arange(batch)[:, None]
    _, state = mixer(x[:, :6], None, valid)
    kind = mixer.state_kind
    fixed, _ = kind.fixed(state, 6)
    shapes = [array.shape for array in fixed]
    for first, taken_back in ((6, 3), (7, 0), (11, 1)):
        part = x[:, first : first + 4]
        want, state = mixer(part, state)
        assert kind.can_rewind(fixed, part.shape[1])
        got, fixed = mixer(part, fixed)
        assert relative_error(got, want) <= FLOAT32
        if taken_back:
            state, fixed = (kind.rewound(each, taken_back) for each in (state, fixed))
        assert [array.shape for array in fixed] == shapes
        assert mx.array_equal(fixed.positions[:, : state.used], state.positions)
        assert mx.all(fixed.positions[:, state.used :] == -1).item()


def test_a_fixed_state_gets_the_space_that_is_asked_for() -> None:
    mixer = _mixer()
    _, state = mixer(mx.zeros((1, GROWTH_STEP - 2, 16)))
    assert [mixer.state_kind.fixed(state, n)[1] for n in (1, 2, 3)] == [2, 2, GROWTH_STEP + 2]


@pytest.mark.parametrize("window", [None, 5])
def test_several_tokens_in_a_fixed_state_have_the_bits_of_single_ones(window: int | None) -> None:
    mixer = _mixer(window=window)
    _, state = mixer(mx.random.normal((2, 6, 16)))
    fixed, _ = mixer.state_kind.fixed(state, 4)
    projected = mx.random.normal((2, 4, 32))
    got, after = mixer.attend(projected, fixed, Context())
    parts = []
    for n in range(4):
        one = projected[:, n : n + 1]
        y, fixed = mixer.attend(one, fixed, Context())
        parts.append(y)
    assert mx.array_equal(got, mx.concatenate(parts, axis=1))
    assert all(mx.array_equal(a, b) for a, b in zip(after, fixed, strict=True))


def test_a_fixed_state_takes_no_padding() -> None:
    mixer = _mixer()
    _, state = mixer(mx.zeros((1, 3, 16)))
    fixed, _ = mixer.state_kind.fixed(state)
    with pytest.raises(ValueError, match="without 'valid' and 'starts'"):
        mixer(mx.zeros((1, 1, 16)), fixed, mx.array([[True]]))
    assert _mixer(window=6, sinks=2).state_kind.fixed(state) is None


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


STORED: list[dict[str, Any]] = [
    {},
    {"window": 7},
    {"window": 5, "sinks": 2},
    {"quantization_start": 4},
    {"quantization_start": 9, "window": 5},
]


def _stored(bits: int, **cache: Any) -> GQA:
    """A mixer whose projections are exact, so that no code lies at a rounding boundary by chance."""
    mx.random.seed(5)
    mixer = GQA(
        16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope=RoPE(32),
        cache=KeyValueCache(quantization=Quantization(bits, 32), **cache),
    )
    mixer.update(tree_map(lambda w: mx.round(32 * w) / 32, mixer.parameters()))
    return mixer


def _exact_input(*shape: int) -> mx.array:
    return mx.random.randint(-8, 8, shape, key=mx.random.key(1)).astype(mx.float32) / 8


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_whole_equals_chunks_equals_steps(bits: int, options: dict[str, Any]) -> None:
    mixer, x = _stored(bits, **options), _exact_input(2, 21, 16)
    whole, last = mixer(x)
    assert last.is_quantized
    for cuts in ([5], [4, 10], list(range(1, 21))):
        state, parts = None, []
        for chunk in mx.split(x, cuts, axis=1):
            y, state = mixer(chunk, state)
            parts.append(y)
        assert relative_error(mx.concatenate(parts, axis=1), whole) <= FLOAT32
        assert mx.array_equal(state.positions, last.positions)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_rows_with_padding_equal_their_tokens_alone(bits: int) -> None:
    for options in ({}, {"window": 7}, {"window": 5, "sinks": 2}):
        mixer, x = _stored(bits, **options), _exact_input(3, 14, 16)
        valid = mx.random.uniform(shape=(3, 14), key=mx.random.key(3)) < mx.array(
            [[0.3], [0.7], [1.0]]
        )
        y, state = mixer(x[:, :6], None, valid[:, :6])
        rest, state = mixer(x[:, 6:], state, valid[:, 6:])
        y, (after, _) = mx.concatenate([y, rest], axis=1), mixer(x[:, :3], state)
        for row, mask in enumerate(valid.tolist()):
            real = mx.array([n for n, is_real in enumerate(mask) if is_real], mx.int32)
            want, _ = mixer(mx.concatenate([x[row, real], x[row, :3]])[None])
            assert relative_error(y[row, real], want[0, :-3]) <= FLOAT32
            assert relative_error(after[row], want[0, -3:]) <= FLOAT32


def test_more_bits_are_nearer_to_exact_attention() -> None:
    x = _exact_input(1, 40, 16)
    exact = _stored(8, quantization_start=40)(x)[0]
    errors = [relative_error(_stored(bits)(x)[0], exact) for bits in (2, 4, 8)]
    assert errors[0] > 4 * errors[1] > 16 * errors[2] > 0
    assert errors[2] < 0.02


def test_quantisation_begins_after_its_start() -> None:
    mixer, x = _stored(8, quantization_start=4), _exact_input(1, 5, 16)
    state, kinds = None, []
    for token in range(5):
        _, state = mixer(x[:, token : token + 1], state)
        kinds.append(state.is_quantized)
    assert kinds == [False] * 4 + [True]
    plain = _stored(8, quantization_start=100)
    assert mx.array_equal(mixer(x[:, :4])[0], plain(x[:, :4])[0])
    assert not mx.array_equal(mixer(x)[0][:, 4:], plain(x)[0][:, 4:])


@pytest.mark.parametrize("options", STORED, ids=str)
@pytest.mark.parametrize("length", [0, 4, 5, 30])
def test_blank_state_is_of_the_kind_that_reading_leaves(
    options: dict[str, Any], length: int
) -> None:
    mixer = _stored(4, **options)
    blank = mixer.state_kind.blank(2, length, mx.float32)
    state = mixer.init_state(2, mx.float32)
    if length:
        _, state = mixer(_exact_input(2, length, 16), state)
    assert blank.is_quantized == state.is_quantized
    assert mx.array_equal(blank.positions, state.positions)


def test_a_limited_state_shares_the_weights_and_leaves_the_mixer_alone() -> None:
    mixer = _mixer()
    limited = mixer.with_state(max_size=9)
    assert limited.query_proj is mixer.query_proj
    x = mx.random.normal((1, 30, 16))
    _, state = limited(x)
    assert state.positions.shape == (1, 9)
    assert sorted(state.positions[0].tolist()) == [0, 1, 2, 3, 25, 26, 27, 28, 29]
    same = GQA(16, num_heads=4, num_kv_heads=2, rope=RoPE(4), cache=KeyValueCache(5, 4))
    same.update(mixer.parameters())
    assert mx.array_equal(limited(x)[0], same(x)[0])
    assert mixer(x)[1].positions.shape == (1, 30)


def test_a_window_of_the_mixer_stays_unless_it_is_larger() -> None:
    x = mx.zeros((1, 30, 16))
    assert _mixer(window=6).with_state(max_size=9)(x)[1].positions.shape == (1, 6)
    _, state = _mixer(window=20).with_state(max_size=9)(x)
    assert sorted(state.positions[0].tolist())[:5] == [0, 1, 2, 3, 25]
    assert _mixer(is_causal=False).with_state(max_size=9)(x)[1] == ()


@pytest.mark.parametrize("options", [{}, {"quantization_start": 4}, {"window": 12}], ids=str)
def test_rewound_state_is_the_earlier_one(options: dict[str, Any]) -> None:
    mixer, x = _stored(8, **options), _exact_input(1, 12, 16)
    _, early = mixer(x[:, :7])
    assert mixer.state_kind.can_rewind(early, 5)
    _, late = mixer(x[:, 7:] * 0.5, early)
    want, got = mixer(x[:, 7:], early), mixer(x[:, 7:], mixer.state_kind.rewound(late, 5))
    assert mx.array_equal(got[0], want[0])


@pytest.mark.parametrize("options", [{"window": 11}, {"window": 3}, {"quantization_start": 11}])
def test_what_is_overwritten_is_not_rewound(options: dict[str, Any]) -> None:
    mixer = _stored(8, **options)
    _, state = mixer(_exact_input(1, 7, 16))
    assert not mixer.state_kind.can_rewind(state, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 4}, "'max_size' must be larger than 4"),
        ({"quantization_start": -1}, "'quantization_start' must not be negative but got -1"),
        (
            {"quantization": Quantization(8, 64)},
            "'group_size' of the quantization must divide 'head_dim' but got 64 for 32. Use 32.",
        ),
    ],
)
def test_impossible_states(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GQA(64, num_heads=2).with_state(**options)


def test_heads_that_no_group_fits_keep_exact_states() -> None:
    with pytest.raises(ValueError, match=r"got 32 for 20\. Keep keys and values exact."):
        GQA(40, num_heads=2, cache=KeyValueCache(quantization=Quantization(8, 32)))


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
        (
            {"num_heads": 4, "cache": KeyValueCache(window=2, sinks=1), "is_causal": False},
            "'sinks' must be 0, or positive with 'is_causal'",
        ),
        ({"num_heads": 5}, "'num_heads' must divide 'dims'"),
        ({"num_heads": 0, "head_dim": 4}, "'num_heads' must be positive"),
        ({"num_heads": 4, "num_kv_heads": 3}, "'num_kv_heads' must divide 'num_heads'"),
        ({"num_heads": 4, "head_dim": -4}, "'head_dim' must be positive"),
    ],
)
def test_impossible_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GQA(16, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": 1}, "'sinks' must be 0, or positive with 'is_causal'"),
        ({"sinks": -1, "window": 2}, "'sinks' must not be negative"),
        ({"window": 0}, "'window' must be positive"),
    ],
)
def test_impossible_caches(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyValueCache(**options)


@pytest.mark.parametrize("window", [None, 3])
def test_bidirectional_attention_stays_within_samples(window: int | None) -> None:
    mixer = _mixer(is_causal=False, window=window)
    x = mx.random.normal((2, 9, 16))
    starts = mx.array([[t in (0, 4) for t in range(9)], [t == 2 for t in range(9)]])
    valid = mx.arange(9) < mx.array([[9], [7]])
    y, _ = mixer(x, None, valid, starts=starts)
    for row, parts in ((0, (slice(0, 4), slice(4, 9))), (1, (slice(0, 2), slice(2, 7)))):
        for part in parts:
            want, _ = mixer(x[row : row + 1, part])
            assert relative_error(y[row : row + 1, part], want) <= FLOAT32


def test_samples_cannot_be_packed_into_a_state_still_to_be_quantised() -> None:
    cache = KeyValueCache(quantization=Quantization(8, 32), quantization_start=3)
    mixer = GQA(32, num_heads=1, cache=cache)
    with pytest.raises(ValueError, match="'starts' must be None while the state is still"):
        mixer(mx.ones((1, 5, 32)), starts=mx.zeros((1, 5), mx.bool_))

"""Keys and values in few bits: the same slots, the same for whole, chunks and steps."""

from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_mmfree.layers.attention.key_values import (
    GROWTH_STEP,
    KeyValueKind,
    KeyValueState,
    extend,
    read,
)
from mlx_mmfree.layers.attention.options import KeyValueCache
from mlx_mmfree.layers.quantization import BITS, Quantization, QuantizedArray
from mlx_mmfree.ops.attention_step import next_slot

HEADS, DIMS = 2, 64
KIND = KeyValueKind(HEADS, DIMS, KeyValueCache(), takes_steps=True)
WINDOWS: list[dict[str, int]] = [{}, {"window": 5}, {"window": 4, "sinks": 2}]


def _empty(batch_size: int = 1, **options: int) -> KeyValueState:
    state = KIND.blank(batch_size, 0, mx.float32)
    return state.quantized(Quantization(**options)) if options else state


def _vectors(batch_size: int, length: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    shape = (2, batch_size, HEADS, length, DIMS)
    keys, values = mx.random.normal(shape, key=mx.random.key(seed))
    return keys, values


class _Seen(NamedTuple):
    """The keys and values that a call sees, and the position of each, `None` for the call's own."""

    keys: mx.array
    values: mx.array
    positions: mx.array | None


def _extended(
    state: KeyValueState,
    keys: mx.array,
    values: mx.array,
    counts: mx.array | None = None,
    **window: int,
) -> tuple[_Seen, KeyValueState]:
    reading = read(state.positions, keys.shape[2], counts, **window)
    keys, values, state = extend(state, keys, values, reading, **window)
    return _Seen(keys, values, reading.seen), state


def _in_use(state: KeyValueState) -> list[mx.array]:
    used = state.positions.shape[1]
    return [state.positions] + [
        array[:, :, :used] for _, array in tree_flatten((state.keys, state.values))
    ]


def _same(a: KeyValueState, b: KeyValueState) -> bool:
    return all(mx.array_equal(x, y) for x, y in zip(_in_use(a), _in_use(b), strict=True))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_stored_vectors_are_those_of_mlx(bits: int, group_size: int) -> None:
    x, _ = _vectors(2, 3)
    stored = QuantizedArray.encode(x, Quantization(bits, group_size))
    parts = mx.quantize(x, group_size=group_size, bits=bits)
    assert all(mx.array_equal(a, b) for a, b in zip(stored, parts, strict=True))
    assert stored.quantization(DIMS) == Quantization(bits, group_size)
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    error = mx.abs(stored.decode(DIMS) - x).reshape(groups.shape).max(axis=-1)
    # values move by half a step, but for the ends, which MLX moves so that zero has a code
    assert mx.all(error <= mx.abs(stored.scales)).item()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_whole_equals_chunks_equals_steps(window: dict[str, int], bits: int) -> None:
    keys, values = _vectors(2, 13)
    _, whole = _extended(_empty(2, bits=bits), keys, values, None, **window)
    for cuts in ([6], [3, 4, 11], list(range(1, 13))):
        state = _empty(2, bits=bits)
        for k, v in zip(mx.split(keys, cuts, axis=2), mx.split(values, cuts, axis=2), strict=True):
            _, state = _extended(state, k, v, None, **window)
        assert _same(state, whole)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("cuts", [[], [5], [1, 2, 9]], ids=str)
def test_slots_are_those_of_exact_states(window: dict[str, int], cuts: list[int]) -> None:
    """Quantising what an exact state holds gives the quantised state, ragged rows included."""
    keys, values = _vectors(3, 12)
    exact, stored = _empty(3), _empty(3, bits=8)
    counts = mx.array([0, 4, 12])
    start = 0
    for k, v in zip(mx.split(keys, cuts, axis=2), mx.split(values, cuts, axis=2), strict=True):
        real = mx.clip(counts - start, 0, k.shape[2])
        seen, exact = _extended(exact, k, v, real, **window)
        got, stored = _extended(stored, k, v, real, **window)
        start += k.shape[2]
        assert mx.array_equal(stored.positions, exact.positions)
        is_real = (
            (mx.arange(k.shape[2]) < real[:, None])
            if seen.positions is None
            else seen.positions >= 0
        )[:, None, :, None]
        for name in ("keys", "values"):
            vectors = getattr(seen, name)
            rounded = QuantizedArray.encode(vectors, Quantization(8, 64)).decode(DIMS)
            assert mx.all(mx.where(is_real, getattr(got, name) == rounded, True)).item()


def test_a_token_sees_itself_as_it_is_stored() -> None:
    keys, values = _vectors(1, 5)
    seen, state = _extended(_empty(bits=4), keys, values, None)
    assert mx.array_equal(seen.keys, QuantizedArray(*state.keys).decode(DIMS)[:, :, :5])
    assert not mx.array_equal(seen.keys, keys)


def test_rows_can_be_selected() -> None:
    keys, values = _vectors(3, 6)
    rows = mx.array([2, 0])
    _, state = _extended(_empty(3, bits=8), keys, values, None)
    _, want = _extended(_empty(2, bits=8), keys[rows], values[rows], None)
    assert _same(tree_map(lambda array: array[rows], state), want)


def test_an_exact_state_becomes_the_quantised_one() -> None:
    keys, values = _vectors(1, 9)
    _, exact = _extended(_empty(), keys, values, None)
    _, want = _extended(_empty(bits=8), keys, values, None)
    assert not exact.is_quantized and want.is_quantized
    assert _same(exact.quantized(Quantization()), want)
    assert want.quantized(Quantization(bits=4)) is want


@pytest.mark.parametrize(("bits", "words"), [(8, 16), (4, 8)])
def test_size_in_memory(bits: int, words: int) -> None:
    keys, values = _vectors(1, 3)
    _, state = _extended(_empty(bits=bits), keys, values, None)
    numbers = sum(array.nbytes for _, array in tree_flatten((state.keys, state.values)))
    # codes, and a scale and a bias for the one group of each vector
    assert numbers == 2 * HEADS * GROWTH_STEP * 4 * (words + 2)


@pytest.mark.parametrize("options", [{}, {"bits": 8}], ids=str)
def test_without_the_last_tokens(options: dict[str, int]) -> None:
    keys, values = _vectors(2, 9)
    _, before = _extended(_empty(2, **options), keys[:, :, :5], values[:, :, :5], None)
    _, after = _extended(before, keys[:, :, 5:] + 1, values[:, :, 5:] + 1, None)
    rewound = KIND.rewound(after, 4)
    assert _same(rewound, before)
    _, want = _extended(before, keys[:, :, 5:], values[:, :, 5:], None)
    _, got = _extended(rewound, keys[:, :, 5:], values[:, :, 5:], None)
    assert _same(got, want)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("options", [{}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("length", [0, 3, 17])
def test_a_blank_state_has_the_shapes_of_a_read_one(
    window: dict[str, int], options: dict[str, int], length: int
) -> None:
    cache = KeyValueCache(**window, quantization=Quantization(**options) if options else None)
    blank = KeyValueKind(HEADS, DIMS, cache, takes_steps=True).blank(2, length, mx.float32)
    state = _empty(2, **options)
    if length:
        _, state = _extended(state, *_vectors(2, length), None, **window)
    assert mx.array_equal(blank.positions, state.positions)
    want = [(array.shape, array.dtype) for array in _in_use(state)]
    assert [(array.shape, array.dtype) for array in _arrays(blank)] == want


def _arrays(state: KeyValueState) -> list[mx.array]:
    return [state.positions] + [array for _, array in tree_flatten((state.keys, state.values))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "'bits' must be one of 2, 3, 4, 5, 6, 8 but got 7"),
        ({"group_size": 16}, "'group_size' must be one of 32, 64, 128 but got 16"),
    ],
)
def test_impossible_storage(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(**options)


def test_a_token_without_a_free_slot_takes_the_last() -> None:
    full = mx.arange(5)[None]
    assert next_slot(full, 5).slots.tolist() == [4]
    assert next_slot(full[:, :4], 5).slots.tolist() == [4]
    rows = mx.array([[0, 1, 2, 3, 4], [0, 1, -1, -1, -1]])
    assert next_slot(rows, 5).slots.tolist() == [[4], [2]]

"""Attention of one token in one pass, against its definition."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import attention_step, use_backend
from mlx_mmfree.ops.attention_step import slot_positions, slots_after
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
WINDOWS = [(None, 0), (1, 0), (7, 0), (5, 2), (1, 3), (400, 0)]


def arguments(
    lengths: list[int],
    groups: int,
    shared: int,
    dims: int,
    *,
    window: int | None = None,
    sinks: int = 0,
    dtype: mx.Dtype = mx.float32,
    stored: mx.Dtype | None = None,
) -> tuple[list[mx.array], dict[str, Any]]:
    """Rows that have read these numbers of tokens, with some space left."""
    batch, heads = len(lengths), groups * shared
    used = slots_after(0, max(lengths), window, sinks)
    positions = slot_positions(mx.array(lengths), used, window, sinks).astype(mx.int32)
    shape = (batch, groups, used + 3, dims)
    buffers = [mx.random.normal(shape).astype(stored or dtype) for _ in range(2)]
    projected = mx.random.normal((batch, 1, (heads + 2 * groups) * dims)).astype(dtype)
    options = {"num_heads": heads, "window": window, "sinks": sinks}
    return [projected, *buffers, positions], options


def wavelengths(dims: int) -> mx.array:
    return mx.power(10000.0, mx.arange(0, dims, 2, dtype=mx.float32) / dims)


def run(backend: str, *args: mx.array, **options: Any) -> tuple[mx.array, ...]:
    with use_backend(backend):
        results = attention_step(*args, **options)
        mx.eval(results)
    return results


def assert_same(got: tuple[mx.array, ...], want: tuple[mx.array, ...]) -> None:
    for g, w in zip(got[:3], want[:3], strict=True):
        assert g.dtype == w.dtype and relative_error(g, w) <= TOLERANCE[g.dtype]
    assert got[3].dtype == mx.int32 and mx.array_equal(got[3], want[3])


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (1, 6), (6, 1), (2, 3), (5, 4), (1, 17)]),
    dims=st.sampled_from([8, 64, 100, 128]),
    window=st.sampled_from(WINDOWS),
    dtype=st.sampled_from(DTYPES),
    stored=st.sampled_from(DTYPES),
    is_rotated=st.booleans(),
    is_interleaved=st.booleans(),
    is_normed=st.booleans(),
    is_transposed=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_equals_definition(
    lengths: list[int],
    heads: tuple[int, int],
    dims: int,
    window: tuple[int | None, int],
    dtype: mx.Dtype,
    stored: mx.Dtype,
    is_rotated: bool,
    is_interleaved: bool,
    is_normed: bool,
    is_transposed: bool,
) -> None:
    mx.random.seed(sum(lengths))
    given, options = arguments(
        lengths, *heads, dims, window=window[0], sinks=window[1], dtype=dtype, stored=stored
    )
    if is_transposed:
        given = [mx.contiguous(x.swapaxes(0, 1)).swapaxes(0, 1) for x in given]
    if is_rotated:
        options |= {"wavelengths": wavelengths(dims), "is_interleaved": is_interleaved}
    if is_normed:
        norms = (1 + mx.random.normal((2, dims)) / 8).astype(dtype)
        options |= {"query_norm": norms[0], "key_norm": norms[1], "norm_eps": 1e-5}
    got = run("native", *given, **options)
    given[0] = given[0].astype(mx.float32)
    want = run("reference", *given, **options)
    assert got[0].dtype == dtype
    assert relative_error(got[0], want[0]) <= max(TOLERANCE[dtype], TOLERANCE[stored])
    assert_same((want[0], *got[1:]), want)


@pytest.mark.parametrize("rotated", [2, 20, 38])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_the_first_dims_of_a_head_rotate(rotated: int, is_interleaved: bool) -> None:
    given, options = arguments([7, 0, 30], 2, 3, 40)
    options |= {"wavelengths": wavelengths(40)[: rotated // 2], "is_interleaved": is_interleaved}
    got = run("native", *given, **options)
    assert_same(got, run("reference", *given, **options))
    # 6 heads of queries lie before the 2 of keys, and the first row has read 7 tokens
    keys = mx.unflatten(given[0][0, 0], 0, (-1, 40))[6:8]
    assert mx.array_equal(got[1][0, :, 7, rotated:], keys[:, rotated:])
    assert not mx.allclose(got[1][0, :, 7, :rotated], keys[:, :rotated])


@pytest.mark.parametrize("length", [0, 1, 1000, 40001, 99_999])
def test_far_positions_rotate_alike(length: int) -> None:
    given, options = arguments([length], 1, 2, 64, window=16)
    options["wavelengths"] = wavelengths(64)
    assert_same(run("native", *given, **options), run("reference", *given, **options))


def test_a_row_has_the_same_bits_alone(instructions: str, threads: int) -> None:
    mx.random.seed(1)
    lengths = [500, 3, 0, 129]
    given, options = arguments(lengths, 2, 3, 40)
    options["wavelengths"] = wavelengths(40)
    whole = run("native", *given, **options)
    native.kernels().set_threads(1)
    for row, length in enumerate(lengths):
        projected, keys, values, positions = (x[row : row + 1] for x in given)
        slots = length + 1
        alone = run(
            "native",
            projected,
            keys[:, :, :slots],
            values[:, :, :slots],
            positions[:, :length],
            **options,
        )
        assert mx.array_equal(alone[0][0], whole[0][row])
        assert mx.array_equal(alone[1][0], whole[1][row, :, :slots])


@pytest.mark.parametrize("window", [(None, 0), (6, 0), (3, 2)])
def test_a_free_slot_may_count_as_in_use(window: tuple[int | None, int]) -> None:
    given, options = arguments([4, 2], 2, 2, 8, window=window[0], sinks=window[1])
    slots = slots_after(4, 3, *window)
    given[1:3] = (x[:, :, :slots] for x in given[1:3])
    want = run("native", *given, **options)
    free = slots - given[3].shape[1]
    given[3] = mx.pad(given[3], [(0, 0), (0, free)], constant_values=-1)
    for backend in ("native", "reference"):
        y, keys, values, positions = run(backend, *given, **options)
        used = want[3].shape[1]
        assert_same((y, keys, values, positions[:, :used]), want)
        assert positions.shape == (2, slots) and mx.all(positions[:, used:] == -1)


def test_arguments_keep_their_values() -> None:
    given, options = arguments([5], 2, 2, 8)
    before = [mx.array(x) for x in given]
    mx.eval(before)
    _, keys, *_ = run("native", *given, **options)
    for array, value in zip(given, before, strict=True):
        assert mx.array_equal(array, value)
    assert not mx.array_equal(keys, given[1])


def test_memory_that_nothing_holds_is_written_in_place() -> None:
    (projected, keys, values, positions), options = arguments([2000], 4, 2, 64)
    mx.eval(projected, keys, values, positions)
    size = keys.nbytes
    for _ in range(2):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        with use_backend("native"):
            y, keys, values, positions = attention_step(
                projected, keys, values, positions, **options
            )
        mx.eval(y, keys, values, positions)
        assert mx.get_peak_memory() - before < size


def test_positions_that_lie_stay_within_the_buffers() -> None:
    given, options = arguments([4], 2, 1, 8)
    for last in (10**6, 2**31 - 1, -(2**31)):
        given[3] = mx.array([[0, last, -7, -1]], mx.int32)
        y, keys, *_ = run("native", *given, **options)
        assert mx.isfinite(y).all() and mx.array_equal(keys[:, :, 5:], given[1][:, :, 5:])


def test_not_a_number_stays_in_its_row_and_group() -> None:
    given, options = arguments([200, 200], 2, 2, 8)
    want = run("native", *given, **options)[0]
    given[1][1, 1, 3, 0] = mx.nan
    got = run("native", *given, **options)[0]
    assert mx.array_equal(got[0], want[0]) and mx.array_equal(got[1, :, :16], want[1, :, :16])
    assert mx.isnan(got[1, :, 16:]).all()
    # these lie beyond the slots in use
    given, options = arguments([200], 2, 2, 8)
    want = run("native", *given, **options)[0]
    given[1][:, :, 202:], given[2][:, :, 202:] = mx.nan, mx.nan
    assert mx.array_equal(run("native", *given, **options)[0], want)


def test_large_scores() -> None:
    given, options = arguments([300], 1, 2, 8)
    given[0] = 1e4 * given[0]
    given[1] = 1e4 * given[1]
    assert_same(run("native", *given, **options), run("reference", *given, **options))


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("window", [(None, 0), (5, 2)])
def test_transforms(window: tuple[int | None, int]) -> None:
    mx.random.seed(3)
    given, options = arguments([9, 3, 6], 2, 2, 8, window=window[0], sinks=window[1])
    options["wavelengths"] = wavelengths(8)
    norms = 1 + mx.random.normal((2, 8)) / 8
    options |= {"query_norm": norms[0], "key_norm": norms[1]}

    def call(*arrays: mx.array) -> tuple[mx.array, ...]:
        return attention_step(*arrays, **options)

    with use_backend("native"):
        want = call(*given)
        assert_same(tuple(mx.compile(call)(*given)), want)
        stacked = [mx.stack([x, x[::-1]]) for x in given]
        mapped = mx.vmap(call)(*stacked)
        for n, order in enumerate((slice(None), slice(None, None, -1))):
            assert_same(tuple(x[n] for x in mapped), tuple(x[order] for x in want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, r"shapes \(B, 1, \(H \+ 2G\) K\)"),
        ({"key_norm": mx.ones(8)}, "must be given together"),
        ({"capacity": 3}, "must have a slot for each of 'positions'"),
        ({"capacity": 0}, "must have a slot for each of 'positions'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    given, options = arguments([4], 2, 2, 8)
    if (capacity := change.pop("capacity", None)) is not None:
        given[1:3] = (x[:, :, :capacity] for x in given[1:3])
    with pytest.raises(ValueError, match=message):
        attention_step(*given, **options | change)

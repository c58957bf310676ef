"""The fused recurrence against its definition."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.errors import BackendError
from mlx_mmfree.ops import mlgru_step, use_backend
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)


def run(backend: str, *args: mx.array, **options: mx.array | None) -> tuple[mx.array, mx.array]:
    with use_backend(backend):
        y, last = mlgru_step(*args, eps=1e-6, **options)
        mx.eval(y, last)
    return y, last


@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    dims=st.integers(1, 700),
    dtype=st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    bounded=st.booleans(),
    padded=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_equals_definition(
    batch: int,
    length: int,
    dims: int,
    dtype: mx.Dtype,
    bounded: bool,
    padded: bool,
    transposed: bool,
) -> None:
    mx.random.seed(dims)
    gates = 3 * mx.random.normal((batch, length, 3 * dims)).astype(dtype)
    if transposed:
        gates = mx.contiguous(gates.swapaxes(0, 2)).swapaxes(0, 2)
    state, weight = mx.random.normal((batch, dims)), 1 + mx.random.normal((dims,)).astype(dtype) / 8
    options = {
        "lower_bound": mx.random.uniform(shape=(dims,)).astype(dtype) if bounded else None,
        "valid": mx.random.uniform(shape=(batch, length)) < 0.6 if padded else None,
    }
    got, last = run("native", gates, state, weight, **options)
    want, want_last = run("reference", gates, state, weight, **options)
    assert got.dtype == dtype and last.dtype == mx.float32
    assert relative_error(got, want) <= TOLERANCE[dtype]
    assert relative_error(last, want_last) <= TOLERANCE[mx.float32]


def test_rows_threads_and_steps_give_the_same_bits(instructions: str, threads: int) -> None:
    mx.random.seed(1)
    gates, state = mx.random.normal((5, 6, 3 * 1100)), mx.random.normal((5, 1100))
    weight, bound = mx.random.normal((1100,)), mx.random.uniform(shape=(1100,))
    whole, last = run("native", gates, state, weight, lower_bound=bound)
    native.kernels().set_threads(1)
    for row in range(5):
        h = state[row : row + 1]
        for t in range(6):
            y, h = run("native", gates[row : row + 1, t : t + 1], h, weight, lower_bound=bound)
            assert mx.array_equal(y[0, 0], whole[row, t])
        assert mx.array_equal(h[0], last[row])


def test_invalid_positions_leave_the_state() -> None:
    gates = mx.full((1, 2, 9), mx.nan)
    state = mx.array([[1.0, 2.0, 3.0]])
    _, last = run("native", gates, state, mx.ones(3), valid=mx.zeros((1, 2), mx.bool_))
    assert mx.array_equal(last, state)


def test_nan_stays_in_its_sequence_and_channel() -> None:
    mx.random.seed(2)
    gates, state = mx.random.normal((2, 3, 30)), mx.random.normal((2, 10))
    want, want_last = run("native", gates, state, mx.ones(10))
    gates[1, 1, 4] = mx.nan
    got, last = run("native", gates, state, mx.ones(10))
    assert mx.array_equal(got[0], want[0]) and mx.array_equal(last[0], want_last[0])
    assert mx.isnan(got[1, 1:, 4]).all() and mx.isnan(got).sum().item() == 2


def test_extreme_gates() -> None:
    values = mx.array([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e4])
    gates = mx.concatenate([values, values, mx.ones(9)])[None, None]
    got, last = run("native", gates, mx.ones((1, 9)), mx.ones(9))
    want, want_last = run("reference", gates, mx.ones((1, 9)), mx.ones(9))
    assert relative_error(got, want) <= 1e-5 and relative_error(last, want_last) <= 1e-5


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("transform", [lambda f: f, mx.compile], ids=["plain", "compiled"])
def test_transforms(transform) -> None:
    mx.random.seed(3)
    gates, state = mx.random.normal((4, 2, 3, 60)), mx.random.normal((4, 2, 20))
    with use_backend("native"):
        call = transform(lambda g, s: mlgru_step(g, s, mx.ones(20), eps=1e-6)[0])
        mapped = mx.vmap(lambda g, s: mlgru_step(g, s, mx.ones(20), eps=1e-6)[0])(gates, state)
        for n in range(4):
            assert relative_error(mapped[n], call(gates[n], state[n])) <= 1e-5


def test_new_samples_are_left_to_the_definition() -> None:
    arguments = mx.ones((1, 2, 9)), mx.ones((1, 3)), mx.ones((3,))
    starts = mx.array([[False, True]])
    with pytest.raises(BackendError, match="'native' cannot run: 'starts' are given"):
        run("native", *arguments, starts=starts)
    with use_backend("reference"):
        want = mlgru_step(*arguments, eps=1e-6, starts=starts)
    got = mlgru_step(*arguments, eps=1e-6, starts=starts)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) <= TOLERANCE[mx.float32]

"""The backends in plain operations: exact sums, long scans, extreme values."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops import linear_scan, pack_ternary, ternary_matmul, use_backend
from tests.ops.kernel_checks import (
    assert_same,
    check_code_sums,
    check_scan,
    check_scan_gradient,
    random_trits,
    scan_inputs,
)

pytestmark = pytest.mark.usefixtures("chunked")


@pytest.mark.parametrize("dims", [1, 31, 33, 63, 96, 100, 128, 5460])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_sums_of_codes_are_exact(rows: int, dims: int) -> None:
    check_code_sums(rows, dims, 33, mx.float32, backend="chunked")


def test_no_rows_and_no_outputs() -> None:
    with use_backend("chunked"):
        weight = pack_ternary(random_trits(3, 32))
        assert ternary_matmul(mx.ones((2, 0, 32)), weight).shape == (2, 0, 3)
        assert ternary_matmul(mx.ones((2, 32)), weight[:0]).shape == (2, 0)


# one chunk, two, many, and as many as make chunks of chunks
@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 100, 1100])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_scan(length: int, dtype: mx.Dtype) -> None:
    inputs = scan_inputs(2, length, 5, dtype)
    check_scan(*inputs, backend="chunked")
    check_scan_gradient(*inputs, backend="chunked")


@pytest.mark.parametrize("gate", [0.0, 1e-30, 1.0])
def test_scan_with_extreme_gates(gate: float) -> None:
    f, i, state = scan_inputs(1, 200, 4, mx.float32)
    f[:, ::3] = gate
    check_scan(f, i, state, backend="chunked")
    check_scan_gradient(f, i, state, backend="chunked")


def test_scan_keeps_bad_values_to_their_channel_and_time() -> None:
    f, i, state = scan_inputs(2, 100, 4, mx.float32)
    i[1, 50, 2] = mx.nan
    with use_backend("chunked"):
        states, last = linear_scan(f, i, state)
    bad = mx.isnan(states)
    want = mx.zeros(bad.shape, mx.bool_)
    want[1, 50:, 2] = True
    assert_same(bad, want)
    assert_same(mx.isnan(last), want[:, -1])

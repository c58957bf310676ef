"""Comparisons of an operation on the backend `metal` with its definition; each raises if it differs."""

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops import (
    linear_scan,
    pack_ternary,
    rms_norm_quantize,
    ternary_matmul,
    use_backend,
)
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def assert_close(got: mx.array, want: mx.array, tolerance: float) -> None:
    # written so that NaN fails too
    if not relative_error(got, want) <= tolerance:
        raise AssertionError(f"relative error {relative_error(got, want)}, not {tolerance}")


def assert_same(got: mx.array, want: mx.array) -> None:
    if got.shape != want.shape or not mx.array_equal(got, want):
        raise AssertionError(f"{int((got != want).sum())} of {want.size} values differ")


def random_trits(outputs: int, dims: int) -> mx.array:
    return mx.random.randint(-1, 2, (outputs, dims))


def check_code_sums(rows: int, dims: int, outputs: int, dtype: mx.Dtype) -> None:
    """Codes give the same bits as whole numbers, called codes or not."""
    mx.random.seed(rows * 10007 + dims)
    codes = mx.random.randint(-128, 128, (rows, dims))
    trits = random_trits(outputs, dims)
    want = (codes[:, None].astype(mx.int32) * trits[None]).sum(axis=-1).astype(mx.float32)
    for are_codes in (False, True):
        with use_backend("metal"):
            got = ternary_matmul(codes.astype(dtype), pack_ternary(trits), codes=are_codes)
        assert_same(got, want)


def check_float_sums(rows: int, dims: int, outputs: int, dtype: mx.Dtype) -> None:
    mx.random.seed(rows * 10007 + dims)
    x = mx.random.normal((rows, dims)).astype(dtype)
    weight = pack_ternary(random_trits(outputs, dims))
    with use_backend("metal"):
        got = ternary_matmul(x, weight)
    with use_backend("reference"):
        want = ternary_matmul(x, weight)
    assert_close(got, want, TOLERANCE[mx.float32])


def check_codes(
    x: mx.array, weight: mx.array | None, eps: float | None, rounding: Rounding
) -> None:
    """Codes are equal but where the scaled value is within 1e-4 of a rounding boundary."""
    with use_backend("metal"):
        codes, scale = rms_norm_quantize(x, weight, eps=eps, rounding=rounding)
    with use_backend("reference"):
        want_codes, want_scale = rms_norm_quantize(x, weight, eps=eps, rounding=rounding)
    assert_close(scale, want_scale, TOLERANCE[mx.float32])
    y = x.astype(mx.float32)
    if eps is not None:
        y = mx.fast.rms_norm(y, None if weight is None else weight.astype(mx.float32), eps)
    scaled = y * want_scale
    clear = mx.abs(mx.abs(scaled - mx.floor(scaled)) - 0.5) > 1e-4
    assert_same(mx.where(clear, codes, 0), mx.where(clear, want_codes, 0))
    assert_close(codes, want_codes, 1.01 / 127)


def check_ties(rounding: Rounding) -> None:
    """The largest value is 127, so the scale is exactly 1 and the ties survive."""
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    x = mx.array([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 126.5, below, -below]])
    with use_backend("metal"):
        codes, scale = rms_norm_quantize(x, rounding=rounding)
    ties = {"half_even": [0, 0, 2, -2, 2, 126], "half_away": [1, -1, 2, -2, 3, 127]}[rounding]
    assert_same(codes, mx.array([[127.0, *ties, 0, 0]]))
    assert_same(scale, mx.array([[1.0]]))


def scan_inputs(batch: int, length: int, dims: int, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    mx.random.seed(batch * 10007 + length * 101 + dims)
    f = mx.sigmoid(mx.random.normal((batch, length, dims)) + 2).astype(dtype)
    i = mx.random.normal((batch, length, dims)).astype(dtype)
    return f, i, mx.random.normal((batch, dims))


def check_scan(*inputs: mx.array) -> None:
    with use_backend("metal"):
        got = linear_scan(*inputs)
    with use_backend("reference"):
        want = linear_scan(*inputs)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, TOLERANCE[mx.float32])


def check_scan_gradient(*inputs: mx.array) -> None:
    weights = mx.random.normal(inputs[0].shape), mx.random.normal(inputs[2].shape)

    def loss(*arrays: mx.array) -> mx.array:
        return sum((r * w).sum() for r, w in zip(linear_scan(*arrays), weights, strict=True))

    gradient = mx.grad(loss, argnums=(0, 1, 2))
    with use_backend("metal"):
        got = gradient(*inputs)
    with use_backend("reference"):
        want = gradient(*inputs)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, max(GRADIENT_TOLERANCE, TOLERANCE[w.dtype]))

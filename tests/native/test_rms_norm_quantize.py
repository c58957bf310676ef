"""The compiled quantisation against its definition, for every instruction set of this processor."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree import native
from mlx_mmfree.ops.rms_norm_quantize import native as compiled
from mlx_mmfree.ops.rms_norm_quantize import reference

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
VARIANTS: list[dict[str, Any]] = [
    {"eps": eps, "rounding": rounding}
    for eps in (None, 1e-6)
    for rounding in ("half_even", "half_away")
]


def inputs(
    rows: int, dims: int, dtype: mx.Dtype, eps: float | None
) -> tuple[mx.array, mx.array | None]:
    mx.random.seed(rows * 1009 + dims)
    x = (mx.random.normal((rows, dims)) * mx.exp(mx.random.normal((rows, 1)))).astype(dtype)
    return x, None if eps is None else (1 + 0.1 * mx.random.normal((dims,))).astype(dtype)


def scaled_values(x: mx.array, weight: mx.array | None, eps: float | None) -> np.ndarray:
    """`y * s` computed in float64, before it is rounded to codes."""
    y = np.array(x.astype(mx.float32)).astype(np.float64)
    if eps is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + np.float32(eps))
        y = y * np.array(weight.astype(mx.float32)) if weight is not None else y
    return y * 127 / np.maximum(np.abs(y).max(-1, keepdims=True), 1e-5)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_values(options: dict[str, Any], instructions: str) -> None:
    for dtype, dims in product(DTYPES, [1, 15, 64, 65, 100, 2560]):
        check_values(options, dtype, dims)


def check_values(options: dict[str, Any], dtype: mx.Dtype, dims: int) -> None:
    x, weight = inputs(6, dims, dtype, options["eps"])
    codes, scale = compiled(x, weight, **options)
    want_codes, want_scale = reference(x, weight, **options)
    case = f"{dims} values of {dtype}"
    assert codes.dtype == scale.dtype == mx.float32, case
    if options["eps"] is None:
        assert mx.array_equal(codes, want_codes) and mx.array_equal(scale, want_scale), case
        return
    # the definition sums the squares one after the other, which costs it some precision
    assert mx.allclose(scale, want_scale, rtol=1e-5, atol=0), case
    exact = scaled_values(x, weight, options["eps"])
    is_clear = np.abs(np.abs(exact) % 1 - 0.5) > 1e-4
    assert np.array_equal(np.array(codes)[is_clear], np.round(exact)[is_clear]), case
    assert np.abs(np.array(codes) - np.array(want_codes)).max() <= 1, case


def test_bits_do_not_depend_on_instructions_rows_or_threads(
    instructions: str, threads: int
) -> None:
    options = {"eps": 1e-6, "rounding": "half_away"}
    x, weight = inputs(300, 700, mx.float32, 1e-6)
    whole = compiled(x, weight, **options)
    for got, want in zip(compiled(x[7:9], weight, **options), whole, strict=True):
        assert mx.array_equal(got, want[7:9])
    mx.eval(whole)
    native.kernels().use_kernels("portable")
    for got, want in zip(compiled(x, weight, **options), whole, strict=True):
        assert mx.array_equal(got, want)


@pytest.mark.parametrize(
    ("rounding", "want"),
    [("half_even", [127, 0, 0, 2, -2, 2, 126, 0]), ("half_away", [127, 1, -1, 2, -2, 3, 127, 0])],
)
def test_ties(rounding: str, want: list[int], instructions: str) -> None:
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    x = mx.array([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 126.5, below]])
    codes, scale = compiled(x, None, eps=None, rounding=rounding)
    assert scale.item() == 1.0
    assert codes.tolist() == [want]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_half_precision_number_is_read(dtype: mx.Dtype, instructions: str) -> None:
    bits = mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16)
    x = bits.view(dtype).reshape(-1, 1)
    codes, scale = compiled(x, None, eps=None, rounding="half_even")
    want_codes, want_scale = reference(x, None, eps=None, rounding="half_even")
    assert mx.array_equal(codes, want_codes, equal_nan=True)
    assert mx.array_equal(scale, want_scale, equal_nan=True)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_zero_tiny_and_bad_rows(options: dict[str, Any], instructions: str) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 100)).astype(np.float32)
    rows[1], rows[2] = 0, rows[2] * 1e-8
    rows[3, 99], rows[4, 0], rows[5, 50] = np.nan, np.inf, -np.inf
    x = mx.array(rows)
    codes, scale = compiled(x, None, **options)
    want_codes, want_scale = reference(x, None, **options)
    assert mx.array_equal(mx.isnan(codes), mx.isnan(want_codes))
    assert mx.isnan(codes[3:6]).any(-1).all()
    assert not mx.isnan(codes[mx.array([0, 1, 2, 6])]).any()
    assert mx.allclose(codes, want_codes, atol=1, equal_nan=True)
    assert mx.allclose(scale, want_scale, rtol=1e-6, equal_nan=True)
    assert not codes[1].any()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_those_of_the_definition(options: dict[str, Any], dtype: mx.Dtype) -> None:
    x, weight = inputs(5, 37, dtype, options["eps"])
    upstream = mx.random.normal((5, 37))
    positions = (0,) if weight is None else (0, 1)

    def gradients(run: Any) -> tuple[mx.array, ...]:
        def loss(*floats: mx.array) -> mx.array:
            codes, scale = run(*floats, *([None] if weight is None else []), **options)
            return (codes * upstream).sum() + scale.sum()

        floats = (x,) if weight is None else (x, weight)
        return mx.grad(loss, argnums=positions)(*floats)

    for got, want in zip(gradients(compiled), gradients(reference), strict=True):
        assert got.dtype == want.dtype
        got, want = got.astype(mx.float32), want.astype(mx.float32)
        tolerance = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]
        assert (mx.abs(got - want).max() <= tolerance * mx.abs(want).max()).item()


def test_batch_dimensions_strides_and_no_rows() -> None:
    options = {"eps": 1e-6, "rounding": "half_even"}
    x, weight = inputs(12, 20, mx.float32, 1e-6)
    codes, scale = compiled(x, weight, **options)
    got = compiled(x.reshape(3, 4, 20), weight, **options)
    assert mx.array_equal(got[0], codes.reshape(3, 4, 20))
    assert mx.array_equal(got[1], scale.reshape(3, 4, 1))
    assert mx.array_equal(compiled(mx.contiguous(x.T).T, weight, **options)[0], codes)
    assert mx.array_equal(compiled(x[::-2], weight, **options)[0], codes[::-2])
    codes, scale = compiled(x[:0], weight, **options)
    assert (codes.shape, scale.shape) == ((0, 20), (0, 1))


@pytest.mark.usefixtures("unfused")
def test_transforms() -> None:
    options = {"eps": 1e-6, "rounding": "half_even"}
    x, weight = inputs(12, 20, mx.float32, 1e-6)
    x = x.reshape(4, 3, 20)
    weights = mx.stack([weight * k for k in (1, 2, -1, 0.5)])

    def ours(x: mx.array, weight: mx.array) -> mx.array:
        return compiled(x, weight, **options)[0]

    want = ours(x, weight)
    assert mx.array_equal(mx.vmap(ours, in_axes=(0, None))(x, weight), want)
    swapped = mx.vmap(ours, in_axes=(1, None), out_axes=1)(x, weight)
    assert mx.array_equal(swapped, want)
    each = mx.stack([ours(x[k], weights[k]) for k in range(4)])
    assert mx.array_equal(mx.vmap(ours)(x, weights), each)
    gradient = mx.grad(lambda x: ours(x, weight).square().sum())
    inside = mx.vmap(gradient)(x)
    outside = mx.grad(lambda x: mx.vmap(lambda x: ours(x, weight).square().sum())(x).sum())(x)
    assert mx.allclose(inside, gradient(x), rtol=1e-5) and mx.allclose(outside, inside, rtol=1e-5)
    assert mx.allclose(mx.compile(gradient)(x), inside, rtol=1e-5)


def test_kernel_checks_its_arguments() -> None:
    kernel = native.kernels().rms_norm_quantize
    with pytest.raises(ValueError, match="with D > 0"):
        kernel(mx.zeros((2, 0)), None, None, False)
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16"):
        kernel(mx.zeros((2, 3), mx.int32), None, None, False)
    for weight, eps in ((mx.zeros(3), None), (mx.zeros(4), 1e-6), (mx.zeros(3, mx.float16), 1e-6)):
        with pytest.raises(ValueError, match=r"'weight' must be \(D,\) float32"):
            kernel(mx.zeros((2, 3)), weight, eps, False)

"""The compiled dense products against float64, for every instruction set of this processor."""

from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import AffineFormat
from mlx_mmfree.ops.dense_matmul import BITS, GROUP_SIZES
from mlx_mmfree.ops.dense_matmul import native as compiled
from tests.ops.test_dense_matmul import exact, quantize
from tests.tolerances import TOLERANCE

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def heavy_tailed(*shape: int) -> mx.array:
    return mx.random.normal(shape) * mx.exp(mx.random.normal(shape))


def multiply(x: mx.array, weight: mx.array, variant: AffineFormat | None = None) -> np.ndarray:
    return np.array(compiled(x, weight, variant))


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    """Compares every row relative to its own largest value."""
    assert got.shape == want.shape
    error = np.abs(got - want).max(-1)
    assert (error <= tolerance * np.abs(want).max(-1)).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_floats(dtype: mx.Dtype, instructions: str, threads: int) -> None:
    mx.random.seed(1)
    for dims, rows, outputs in product((1, 31, 33, 64, 700), (1, 2, 5, 9), (1, 2, 50)):
        x = heavy_tailed(rows, dims)
        weight = mx.random.normal((outputs, dims)).astype(dtype)
        wide = np.array(weight.astype(mx.float32)).astype(np.float64)
        want = np.array(x).astype(np.float64) @ wide.T
        # one output may be small by cancellation
        scale = np.abs(np.array(x)).astype(np.float64) @ np.abs(wide).T
        error = np.abs(multiply(x, weight) - want)
        assert (error <= TOLERANCE[mx.float32] * scale).all(), (dims, rows, outputs)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_every_16_bit_float_is_read_exactly(dtype: mx.Dtype, instructions: str) -> None:
    weight = mx.arange(2**16, dtype=mx.uint32).astype(mx.uint16).view(dtype).reshape(-1, 1)
    got = multiply(mx.ones((1, 1)), weight)[0]
    want = np.array(weight.astype(mx.float32))[:, 0]
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", BITS)
def test_codes(bits: int, instructions: str, threads: int) -> None:
    mx.random.seed(bits)
    for group_size, groups, dtype in product(GROUP_SIZES, (1, 3, 21), DTYPES):
        dims = group_size * groups
        codes, variant = quantize(50, dims, group_size, bits, dtype)
        x = heavy_tailed(7, dims)
        assert_close(multiply(x, codes, variant), exact(x, codes, variant), TOLERANCE[mx.float32])


def rounded(x: mx.array) -> mx.array:
    """Each 32 numbers as multiples of a hundred and twenty-seventh of the largest."""
    blocks = np.array(x).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / largest))
    return mx.array((codes * (largest / np.float32(127))).reshape(x.shape))


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [1, 2])
def test_rounded_activations(bits: int, instructions: str, threads: int) -> None:
    mx.random.seed(bits)
    for group_size, groups, dtype in product(GROUP_SIZES, (1, 3, 21, 40), DTYPES):
        codes, variant = quantize(50, group_size * groups, group_size, bits, dtype)
        x = heavy_tailed(7, group_size * groups)
        got = np.array(compiled(x, codes, variant, True))
        assert_close(got, exact(rounded(x), codes, variant), TOLERANCE[mx.float32])
        assert np.array_equal(np.array(compiled(x[2:5], codes, variant, True)), got[2:5])
    x[1, 3], x[4] = np.nan, 0
    got = np.array(compiled(x, codes, variant, True))
    assert np.isnan(got).all(-1).tolist() == [row == 1 for row in range(7)]
    assert not got[4].any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("bits", [*BITS, 16])
def test_a_row_does_not_depend_on_the_others(bits: int, instructions: str, threads: int) -> None:
    mx.random.seed(bits)
    x = heavy_tailed(150, 320)
    variant = None
    if bits == 16:
        weight = mx.random.normal((77, 320)).astype(mx.bfloat16)
    else:
        weight, variant = quantize(77, 320, 64, bits)
    whole = multiply(x, weight, variant)
    for rows in (1, 2, 3, 4, 5, 6, 8, 70):
        assert np.array_equal(multiply(x[3 : 3 + rows], weight, variant), whole[3 : 3 + rows])
    before = native.kernels().threads()
    native.kernels().set_threads(1)
    assert np.array_equal(multiply(x, weight, variant), whole)
    native.kernels().set_threads(before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_alone(bad: float, instructions: str) -> None:
    x = np.ones((6, 128), np.float32)
    x[4, 50] = bad
    rest = np.arange(6) != 4
    weight = mx.random.normal((20, 128))
    floats = multiply(mx.array(x), weight)
    assert not np.isfinite(floats[4]).any()
    assert np.isfinite(floats[rest]).all()
    codes, variant = quantize(20, 128, 32, 4)
    quantized = multiply(mx.array(x), codes, variant)
    assert np.isnan(quantized[4]).all()
    assert np.isfinite(quantized[rest]).all()


def test_extreme_activations(instructions: str) -> None:
    mx.random.seed(0)
    codes, variant = quantize(30, 256, 64, 8)
    for scale in (1e-25, 1.0, 1e30):
        x = mx.random.normal((3, 256)) * scale
        assert_close(multiply(x, codes, variant), exact(x, codes, variant), TOLERANCE[mx.float32])
    assert not multiply(mx.zeros((2, 256)), codes, variant).any()
    # the largest sums of whole numbers that there are
    for sign in (-1, 1):
        x = mx.full((1, 256), 1.0 * sign)
        ones = AffineFormat(mx.ones((1, 4)), mx.zeros((1, 4)), 64, 8)
        got = multiply(x, mx.full((1, 64), 0xFFFFFFFF, dtype=mx.uint32), ones)
        assert got.item() == pytest.approx(sign * 255 * 256, rel=1e-6)


def test_strides_batches_and_empty_arrays() -> None:
    mx.random.seed(2)
    x, (codes, variant) = mx.random.normal((4, 3, 64)), quantize(10, 64, 32, 6)
    weight = mx.random.normal((10, 64)).astype(mx.float16)
    for w, f in ((codes, variant), (weight, None)):
        flat = multiply(x.reshape(12, 64), w, f)
        assert np.array_equal(multiply(x, w, f), flat.reshape(4, 3, 10))
        assert np.array_equal(multiply(mx.contiguous(x.T).T, w, f), flat.reshape(4, 3, 10))
        assert np.array_equal(multiply(x[0, 0], w, f), flat[0])
        assert multiply(x[:0], w, f).shape == (0, 3, 10)
        mapped = mx.vmap(lambda x: compiled(x, w, f), in_axes=1)(x)  # noqa: B023
        assert np.array_equal(np.array(mapped), flat.reshape(4, 3, 10).swapaxes(0, 1))
    assert np.array_equal(multiply(x, weight[::-2]), multiply(x, weight)[..., ::-2])
    assert multiply(x, weight[:0]).shape == (4, 3, 0)


def test_kernels_check_their_arguments() -> None:
    module, (codes, variant) = native.kernels(), quantize(10, 64, 32, 4)
    x = mx.zeros((2, 64))
    with pytest.raises(ValueError, match="'x' must be float32"):
        module.dense_matmul(x.astype(mx.float16), mx.zeros((3, 64)), None, None, 0)
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16"):
        module.dense_matmul(x, mx.zeros((3, 64), mx.int32), None, None, 0)
    with pytest.raises(ValueError, match="'biases' like 'scales'"):
        module.dense_matmul(x, codes, variant.scales, variant.biases[:5], 4)
    with pytest.raises(ValueError, match="with 1, 2, 4, 6 or 8 bits"):
        module.dense_matmul(x, codes, variant.scales, variant.biases, 8)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape(data: st.DataObject) -> None:
    rows, groups, outputs = (data.draw(st.integers(1, most)) for most in (12, 20, 60))
    bits, group_size = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(GROUP_SIZES))
    mx.random.seed(data.draw(st.integers(0, 2**32 - 1)))
    module = native.kernels()
    before = module.kernel_name(), module.threads()
    codes, variant = quantize(outputs, groups * group_size, group_size, bits)
    x = heavy_tailed(rows, groups * group_size)
    want = exact(x, codes, variant)
    module.use_kernels(data.draw(st.sampled_from(module.kernel_names())))
    module.set_threads(data.draw(st.integers(1, 4)))
    try:
        got = multiply(x, codes, variant)
    finally:
        module.use_kernels(before[0])
        module.set_threads(before[1])
    size = np.abs(exact(mx.abs(x), codes, variant)).max()
    assert np.abs(got - want).max() <= TOLERANCE[mx.float32] * max(np.abs(want).max(), size)

"""Every Metal kernel: values, gradients, and how much memory it reads and writes."""

import importlib
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers import PackedBitLinear
from mlx_mmfree.ops import (
    gather_ternary_matmul,
    linear_scan,
    pack_ternary,
    packed_width,
    rms_norm_quantize,
    ternary_matmul,
    use_backend,
)
from mlx_mmfree.ops.backend.metal_functions import without_halves
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    assert_close,
    assert_same,
    check_code_sums,
    check_codes,
    check_extreme_input,
    check_float_sums,
    check_scan,
    check_scan_gradient,
    check_ties,
    random_trits,
    scan_inputs,
)
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE

pytestmark = [pytest.mark.metal, pytest.mark.usefixtures("metal")]

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
SIZES = [1, 31, 33, 63, 100, 5460]
FEW, MANY = 5, 70


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", [*FLOATS, mx.int8], ids=str)
def test_sums_of_codes_are_exact(rows: int, dims: int, dtype: mx.Dtype) -> None:
    # bfloat16 holds whole numbers up to 256
    check_code_sums(rows, dims, 33, dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dims", "rows"), [(32, 1), (96, 8), (48, 1), (64, 9), (50, 48), (64, 49), (96, 65)]
)
@pytest.mark.parametrize("outputs", [1, 8, 70])
def test_sums_of_codes_for_other_shapes(rows: int, dims: int, outputs: int) -> None:
    check_code_sums(rows, dims, outputs, mx.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", [63, 5460])
@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_floats(rows: int, dims: int, dtype: mx.Dtype) -> None:
    check_float_sums(rows, dims, 33, dtype)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_sums_of_arrays_that_are_not_contiguous(rows: int) -> None:
    mx.random.seed(0)
    codes = mx.random.randint(-128, 128, (100, 2, rows)).astype(mx.float32)
    weight = pack_ternary(random_trits(66, 100))
    x = codes.transpose(1, 2, 0)
    with use_backend("metal"):
        got = ternary_matmul(x[:, ::-1], weight[::2])
    with use_backend("reference"):
        want = ternary_matmul(mx.contiguous(x[:, ::-1]), mx.contiguous(weight[::2]))
    assert_same(got, want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("are_halves", [False, True])
@pytest.mark.parametrize("dims", [1, 63, 544])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_meet_the_matrices_that_they_name(
    dtype: mx.Dtype, dims: int, are_halves: bool
) -> None:
    mx.random.seed(dims)
    weight = pack_ternary(random_trits(3 * 33, dims)).reshape(3, 33, -1)
    x, indices = mx.random.normal((5, 2, dims)).astype(dtype), mx.random.randint(0, 3, (5, 2))
    with use_backend("metal"), nullcontext() if are_halves else without_halves():
        got = gather_ternary_matmul(x, weight, indices)
    with use_backend("reference"):
        want = gather_ternary_matmul(x, weight, indices)
    assert_close(got, want, TOLERANCE[mx.float32])


def test_an_input_that_halves_cannot_scale_is_multiplied_by_trits() -> None:
    weight = pack_ternary(random_trits(2 * 9, 64)).reshape(2, 9, -1)
    x, indices = mx.random.normal((3, 64)), mx.array([0, 1, 1])
    x[1, 5] = 1e38
    with use_backend("metal"):
        got = gather_ternary_matmul(x, weight, indices)
    with use_backend("reference"):
        want = gather_ternary_matmul(x, weight, indices)
    for row in range(3):
        assert_close(got[row], want[row], TOLERANCE[mx.float32])


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_bad_row_stays_alone(rows: int) -> None:
    weight = pack_ternary(random_trits(33, 100))
    x = mx.ones((rows, 100))
    x[1, 40], x[3, 99] = mx.nan, mx.inf
    with use_backend("metal"):
        got = ternary_matmul(x, weight)
    finite = mx.isfinite(got).all(axis=1).tolist()
    assert [n for n, ok in enumerate(finite) if not ok] == [1, 3]
    # a trit of zero makes NaN of infinity, the others keep it
    with use_backend("reference"):
        assert mx.allclose(got, ternary_matmul(x, weight), equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("value", [mx.inf, -mx.inf, mx.nan, 2.0**104, -(2.0**126), 2.0**-126])
def test_extreme_inputs_are_those_without_halves(rows: int, value: float) -> None:
    check_extreme_input(rows, value)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_sums_with_halves_are_about_as_exact(mean: float) -> None:
    mx.random.seed(1)
    trits = random_trits(64, 2560)
    x = mean + mx.random.normal((1, 2560))
    want = np.array(x, np.float64) @ np.array(trits, np.float64).T
    errors = []
    with use_backend("metal"):
        errors.append(np.array(ternary_matmul(x, pack_ternary(trits))) - want)
        with without_halves():
            errors.append(np.array(ternary_matmul(x, pack_ternary(trits))) - want)
    ours, plain = (np.sqrt((error**2).mean()) for error in errors)
    # the sums of these trits are of two halves of the inputs, which already makes errors smaller
    assert ours <= 2 * np.sqrt(2) * plain


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_gradient_of_the_product(rows: int) -> None:
    mx.random.seed(1)
    x, weight = mx.random.normal((rows, 100)), pack_ternary(random_trits(33, 100))

    def gradient(x: mx.array) -> mx.array:
        return mx.grad(lambda x: (ternary_matmul(x, weight) ** 2).sum())(x)

    with use_backend("metal"):
        got = gradient(x)
    with use_backend("reference"):
        assert_close(got, gradient(x), GRADIENT_TOLERANCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_with_a_weighted_norm(dims: int, dtype: mx.Dtype) -> None:
    mx.random.seed(dims)
    weight = (1 + 0.1 * mx.random.normal((dims,))).astype(dtype)
    check_codes(mx.random.normal((5, dims)).astype(dtype), weight, 1e-6, "half_away")


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_codes_without_weight(eps: float | None, rounding: Rounding) -> None:
    mx.random.seed(2)
    x = mx.random.normal((2, 3, 300)).swapaxes(0, 1)
    check_codes(x, None, eps, rounding)


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_exact_ties(rounding: Rounding) -> None:
    check_ties(rounding)


def test_codes_of_extreme_rows() -> None:
    x = mx.array(
        [[0.0] * 4, [1e-7, -1e-7, 0, 0], [mx.nan, 1, 1, 1], [mx.inf, 1, 1, 1], [4, -4, 1, 0]]
    )
    for eps in (None, 1e-6):
        with use_backend("metal"):
            got = rms_norm_quantize(x, eps=eps)
        with use_backend("reference"):
            want = rms_norm_quantize(x, eps=eps)
        for g, w in zip(got, want, strict=True):
            assert mx.allclose(g, w, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("length", [1, 31, 63, 100, 200])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scan(length: int, dtype: mx.Dtype) -> None:
    inputs = scan_inputs(2, length, 37, dtype)
    check_scan(*inputs)
    check_scan_gradient(*inputs)


def test_scan_with_indices_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mlx_mmfree.ops.linear_scan"), "_MANY_INDICES", 0)
    inputs = scan_inputs(2, 200, 37, mx.float16)
    check_scan(*inputs)
    check_scan_gradient(*inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1100, 1), (1, 130, 5460)], ids=str)
def test_scan_of_other_shapes(shape: tuple[int, int, int]) -> None:
    inputs = scan_inputs(*shape, mx.float32)
    check_scan(*inputs)
    check_scan_gradient(*inputs)


def test_scan_of_arrays_that_are_not_contiguous() -> None:
    f, i, state = scan_inputs(33, 130, 2, mx.float32)
    inputs = f.transpose(2, 1, 0), i.transpose(2, 1, 0), state.T
    check_scan(*inputs)
    check_scan_gradient(*inputs)


def test_short_scans_have_the_bits_of_the_definition() -> None:
    inputs = scan_inputs(2, 100, 37, mx.float32)
    with use_backend("metal"):
        got = linear_scan(*inputs)
    with use_backend("reference"):
        want = linear_scan(*inputs)
    for g, w in zip(got, want, strict=True):
        # a GPU may round a product and a sum once
        assert_close(g, w, 1e-6)


def test_empty_arrays() -> None:
    with use_backend("metal"):
        assert ternary_matmul(mx.ones((0, 32)), pack_ternary(random_trits(3, 32))).shape == (0, 3)
        codes, scale = rms_norm_quantize(mx.ones((0, 3)))
        assert (codes.shape, scale.shape) == ((0, 3), (0, 1))
        states, last = linear_scan(mx.ones((2, 0, 3)), mx.ones((2, 0, 3)), mx.ones((2, 3)))
        assert (states.shape, last.tolist()) == ((2, 0, 3), [[1.0] * 3] * 2)


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_the_order_of_threads_does_not_matter(emulated: Emulator, seed: int) -> None:
    emulated.seed = seed
    check_code_sums(FEW, 100, 33, mx.float32)
    check_code_sums(MANY, 100, 70, mx.float32)
    check_codes(mx.cos(mx.arange(900)).reshape(3, 300), None, 1e-6, "half_even")
    inputs = scan_inputs(2, 200, 37, mx.float32)
    check_scan(*inputs)
    check_scan_gradient(*inputs)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("dims", [100, 96])
def test_decoding_reads_each_packed_word_once(emulated: Emulator, rows: int, dims: int) -> None:
    check_code_sums(rows, dims, 33, mx.float32)
    record = emulated.records[-1]
    # the last words of a row may hold padding alone; three outputs are missing to the last four, so
    # that the last is read twice
    assert record.loaded["weight"] == 36 * -(-dims // 16) * 4
    assert record.stored == {"out": rows * 33 * 4}


@pytest.mark.parametrize(("rows", "groups"), [(5, 1), (8, 2), (9, 2), (17, 4), (48, 10)])
def test_some_rows_are_computed_in_groups(emulated: Emulator, rows: int, groups: int) -> None:
    check_code_sums(rows, 100, 32, mx.float32)
    assert emulated.records[-1].loaded["weight"] == groups * 32 * 7 * 4


@pytest.mark.parametrize(("rows", "outputs"), [(64, 64), (70, 33), (130, 70)])
def test_many_rows_read_weights_once_for_a_tile(
    emulated: Emulator, rows: int, outputs: int
) -> None:
    check_code_sums(rows, 100, outputs, mx.float16)
    record = emulated.records[-1]
    # rows and outputs beyond the last are the last one's once more
    tiles = -(-rows // 64) * -(-outputs // 64)
    assert record.loaded["weight"] == tiles * 64 * packed_width(100) * 4
    assert record.loaded["x"] == tiles * 64 * 100 * 2
    assert record.stored == {"out": rows * outputs * 4}


def test_traffic_of_the_codes(emulated: Emulator) -> None:
    x = mx.random.normal((3, 300)).astype(mx.float16)
    with use_backend("metal"):
        rms_norm_quantize(x)
    record = emulated.records[-1]
    assert record.loaded["x"] == 2 * x.nbytes
    assert record.stored == {"codes": 3 * 300 * 4, "scale": 3 * 4}


@pytest.mark.parametrize(("length", "twice"), [(1, 0), (127, 0), (128, 64), (200, 134)])
def test_traffic_of_the_scan(emulated: Emulator, length: int, twice: int) -> None:
    check_scan(*scan_inputs(2, length, 37, mx.float32))
    record = emulated.records[-1]
    for name in ("f", "i"):
        assert record.loaded[name] == 2 * (length + twice) * 37 * 4
    assert record.stored == {"states": 2 * length * 37 * 4, "last": 2 * 37 * 4}


def test_launches_of_a_packed_linear(emulated: Emulator) -> None:
    layer = PackedBitLinear(96, 33, norm_eps=1e-6, rounding="half_away")
    with use_backend("metal"):
        for rows, kernels in (
            (48, ["bit_linear_1"]),
            (49, ["bit_linear_codes", "bit_linear_tiles"]),
        ):
            layer(mx.ones((1, rows, 96)))
            first = len(emulated.records)
            layer(mx.ones((1, rows, 96)))
            names = [record.kernel for record in emulated.records[first:]]
            assert len(names) == len(kernels)
            assert all(kernel in name for kernel, name in zip(kernels, names, strict=True))

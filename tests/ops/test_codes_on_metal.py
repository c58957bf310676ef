"""The Metal kernel for few rows and codes: exact sums, errors beside MLX's, its choice."""

import importlib
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import AffineFormat, dense_matmul, use_backend
from mlx_mmfree.ops.backend import launch, self_check
from mlx_mmfree.ops.backend.metal_functions import without_halves
from mlx_mmfree.ops.dense_matmul import GROUP_SIZES
from tests.emulator.emulator import Emulator
from tests.emulator.texts_of_mlx import product_of_codes
from tests.ops.test_dense_matmul import exact, quantize
from tests.tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.metal, pytest.mark.usefixtures("metal")]

metal = importlib.import_module("mlx_mmfree.ops.dense_matmul.metal")
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def whole_numbers(
    rows: int, dims: int, outputs: int, group_size: int, bits: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, AffineFormat]:
    """Inputs, codes, and scales that are powers of 2, whose sums float32 holds exactly."""
    mx.random.seed(rows * 10007 + dims)
    x = mx.random.randint(-8, 9, (rows, dims)).astype(dtype)
    words = mx.random.randint(-(2**31), 2**31, (outputs, dims * bits // 32)).view(mx.uint32)
    groups = (outputs, dims // group_size)
    scales = mx.power(2.0, mx.random.randint(-3, 2, groups))
    biases = mx.random.randint(-16, 17, groups) / 8
    return x, words, AffineFormat(scales.astype(dtype), biases.astype(dtype), group_size, bits)


@pytest.mark.sample(1, of="bits")
@pytest.mark.parametrize("rows", range(1, metal.MOST_ROWS + 1))
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", metal.BITS)
def test_sums_that_float32_holds_are_exact(
    bits: int, group_size: int, dtype: mx.Dtype, rows: int
) -> None:
    # a second round of some lanes, and last outputs that are fewer than a SIMD group's
    for dims, outputs in ((group_size, 8), (9 * 128, 21)):
        arrays = whole_numbers(rows, dims, outputs, group_size, bits, dtype)
        for context in (nullcontext(), without_halves()):
            with use_backend("metal"), context:
                got = dense_matmul(*arrays)
            assert np.array_equal(np.array(got, np.float64), exact(*arrays))


@pytest.mark.sample(1, of="bits")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("bits", metal.BITS)
def test_eight_outputs_of_a_simd_group_are_exact(
    bits: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal, "FILLING_SIMD_GROUPS", 2)
    arrays = whole_numbers(rows, 1152, 21, 64, bits, mx.float16)
    assert metal.Tuning.of(bits, rows, 21).outputs == (4 if (bits, rows) == (6, 2) else 8)
    with use_backend("metal"):
        got = dense_matmul(*arrays)
    assert np.array_equal(np.array(got, np.float64), exact(*arrays))


_OF_MLX = mx.fast.metal_kernel(
    name="qmv_fast",
    input_names=["w", "scales", "biases", "x"],
    output_names=["y"],
    header=product_of_codes(),
    source="""
    qmv_fast_impl<T, GROUP, BITS>(w, scales, biases, x, y, x_shape[1], w_shape[0],
        threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def by_mlx(x: mx.array, codes: mx.array, variant: AffineFormat) -> mx.array:
    """The product by MLX's kernel for few rows, launched as MLX launches it."""
    (y,) = launch.launch(
        _OF_MLX,
        inputs=[codes, variant.scales, variant.biases, x],
        template=[("T", x.dtype), ("GROUP", variant.group_size), ("BITS", variant.bits)],
        grid=(64 * x.shape[0], codes.shape[0] // 8, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(x.shape[0], codes.shape[0])],
        output_dtypes=[x.dtype],
    )
    return y


@pytest.mark.sample(1, of="bits")
@pytest.mark.parametrize("mean", [0, 1])
@pytest.mark.parametrize("dims", [2048, 4096, 12288])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", metal.BITS)
def test_errors_are_about_those_of_the_kernel_of_mlx(
    bits: int, group_size: int, dims: int, mean: int
) -> None:
    mx.random.seed(bits)
    codes, variant = quantize(64, dims, group_size, bits)
    x = mean + mx.random.normal((2, dims))
    weight = mx.dequantize(codes, *variant[:2], group_size=group_size, bits=bits)
    sizes = np.abs(np.array(x, np.float64)) @ np.abs(np.array(weight, np.float64)).T
    want = exact(x, codes, variant)
    with use_backend("metal"):
        results = dense_matmul(x, codes, variant), by_mlx(x, codes, variant)
    own, others = (
        np.sqrt(np.mean(((np.array(y, np.float64) - want) / sizes) ** 2)) for y in results
    )
    assert 0 < own <= 1.5 * others


@pytest.mark.parametrize("bits", metal.BITS)
def test_inputs_near_the_end_of_the_range_do_not_overflow(bits: int) -> None:
    x, words, variant = whole_numbers(1, 128, 8, 32, bits, mx.bfloat16)
    large = (x * 2.0**100).astype(mx.bfloat16), words, variant
    for context in (nullcontext(), without_halves()):
        with use_backend("metal"), context:
            want, got = dense_matmul(x, words, variant), dense_matmul(*large)
        assert mx.array_equal(got, want * 2.0**100)
        # with a unit of 2^24 before the sum, these would be infinite
        assert mx.abs(got).max().item() > 2.0**104


def test_a_bad_row_stays_alone() -> None:
    x, words, variant = whole_numbers(5, 128, 9, 32, 2, mx.float32)
    x[1, 40], x[3, 99] = mx.nan, mx.inf
    with use_backend("metal"):
        got = dense_matmul(x, words, variant)
    assert mx.isfinite(got).all(axis=1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_gradient_is_that_of_the_product_of_mlx(dtype: mx.Dtype) -> None:
    mx.random.seed(0)
    codes, (scales, biases, *sizes) = quantize(16, 128, 32, 2, dtype)
    x, upstream = mx.random.normal((3, 128)).astype(dtype), mx.random.normal((3, 16)).astype(dtype)

    def product(*floats: mx.array) -> mx.array:
        x, scales, biases = floats
        return dense_matmul(x, codes, AffineFormat(scales, biases, *sizes), dtype=dtype)

    found = []
    for backend in ("metal", "reference"):
        with use_backend(backend):
            found.append(mx.vjp(product, [x, scales, biases], [upstream])[1])
    for got, want in zip(*found, strict=True):
        assert got.dtype == dtype
        assert relative_error(got, want) <= 2 * TOLERANCE[dtype]


def kernels_of(
    emulated: Emulator, x: mx.array, codes: mx.array, variant: AffineFormat
) -> list[str]:
    with use_backend("metal"):
        mx.eval(dense_matmul(x, codes, variant))
        emulated.records.clear()
        mx.eval(dense_matmul(x, codes, variant))
    return [record.kernel for record in emulated.records]


def test_which_products_it_computes(emulated: Emulator) -> None:
    few, more = mx.ones((2, 4, 128)), mx.ones((9, 128))
    for bits in (1, 2, 4, 6, 8):
        codes, variant = quantize(16, 128, 64, bits)
        is_taken = bits in metal.BITS
        assert len(kernels_of(emulated, few, codes, variant)) == is_taken
        assert not kernels_of(emulated, more, codes, variant)
    codes, variant = quantize(7, 128, 64, 2)
    assert not kernels_of(emulated, few, codes, variant)


def test_a_kernel_that_fails_its_check_leaves_the_product_to_mlx(emulated: Emulator) -> None:
    codes, variant = quantize(16, 128, 64, 2)
    x = mx.random.normal((2, 128))
    emulated.edit = lambda text: text.replace("middle, totals[row]", "bias, totals[row]")
    self_check.check_again()
    with (
        use_backend("metal"),
        pytest.warns(RuntimeWarning, match="dense_matmul_of_codes.* is switched"),
    ):
        got = dense_matmul(x, codes, variant)
    assert emulated.records
    emulated.records.clear()
    with use_backend("metal"):
        assert mx.array_equal(dense_matmul(x, codes, variant), got)
    assert not emulated.records
    assert relative_error(got, mx.array(exact(x, codes, variant))) <= TOLERANCE[mx.float32]


def test_the_reported_fault_is_that_of_the_kernel_that_would_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = whole_numbers(3, 128, 8, 64, 2, mx.float16)
    checked: list[tuple[object, ...]] = []

    def fault(*given: object) -> str:
        checked.append(given)
        return "it is odd"

    monkeypatch.setattr(metal, "_fault", fault)
    assert metal.fault(*arrays) == "it is odd"
    metal.metal(*arrays)
    assert checked == 2 * [(metal.Tuning.of(2, 3, 8), mx.float16, mx.float16, mx.float32)]

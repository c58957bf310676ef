"""Products of rows with one of several matrices each on Metal, beside float64."""

from collections.abc import Iterator
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.channel_mixers import MixtureOfExperts
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.layers.dense import QuantizedLinear
from mlx_mmfree.ops import (
    AffineFormat,
    gather_affine_matmul,
    gather_ternary_matmul,
    pack_ternary,
    use_backend,
)
from mlx_mmfree.ops.backend.metal_functions import without_halves
from tests.emulator.emulator import Emulator
from tests.graph import launches
from tests.ops.planting import Fault, assert_seen
from tests.tolerances import TOLERANCE, relative_error

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# rows of each matrix: none, one, two at a time, and one more
COUNTS = (0, 1, 2, 5, 4)


def starts_of(counts: tuple[int, ...]) -> mx.array:
    return mx.array(np.cumsum([0, *counts]))


def rows_for(
    counts: tuple[int, ...], dims: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array, mx.array]:
    """Rows sorted by matrix, the matrix of each, and where the rows of each begin."""
    mx.random.seed(dims)
    x = mx.random.normal((sum(counts), dims)).astype(dtype)
    indices = mx.array(np.repeat(np.arange(len(counts)), counts).astype(np.uint32))
    return x, indices, starts_of(counts)


def trits_of(count: int, outputs: int, dims: int) -> tuple[mx.array, np.ndarray]:
    trits = mx.random.randint(-1, 2, (count * outputs, dims))
    packed = pack_ternary(trits).reshape(count, outputs, -1)
    return packed, np.array(trits, np.float64).reshape(count, outputs, dims)


def codes_of(
    count: int, outputs: int, dims: int, group_size: int, dtype: mx.Dtype, bits: int = 2
) -> tuple[mx.array, AffineFormat, np.ndarray]:
    matrix = mx.random.normal((count * outputs, dims))
    codes, *floats = mx.quantize(matrix, group_size, bits)
    floats = [part.astype(dtype) for part in floats]
    own = (part.astype(mx.float32) for part in floats)
    written = mx.dequantize(codes, *own, group_size, bits)
    parts = [part.reshape(count, outputs, -1) for part in (codes, *floats)]
    variant = AffineFormat(*parts[1:], group_size=group_size, bits=bits)
    return parts[0], variant, np.array(written, np.float64).reshape(count, outputs, dims)


def by_formula(x: mx.array, matrices: np.ndarray, indices: mx.array) -> mx.array:
    chosen = matrices[np.array(indices)]
    rows = np.array(x.astype(mx.float32), np.float64)
    return mx.array(np.einsum("rd,rnd->rn", rows, chosen))


@pytest.fixture(params=["halves", "no halves"])
def halves(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.param == "halves" else without_halves():
        yield


@pytest.mark.sample(4)
@pytest.mark.metal
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "dims"), [(3, 33), (8, 64), (21, 1040), (16, 512)])
def test_trits(
    metal: None, halves: None, outputs: int, dims: int, dtype: mx.Dtype, is_sorted: bool
) -> None:
    x, indices, starts = rows_for(COUNTS, dims, dtype)
    weight, matrices = trits_of(len(COUNTS), outputs, dims)
    with use_backend("metal"):
        got = gather_ternary_matmul(x, weight, indices, starts=starts if is_sorted else None)
    assert got.dtype == mx.float32
    assert relative_error(got, by_formula(x, matrices, indices)) <= TOLERANCE[mx.float32]


@pytest.mark.sample(4)
@pytest.mark.metal
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("outputs", "dims", "group_size"), [(3, 64, 32), (8, 192, 64), (21, 1024, 128), (16, 512, 64)]
)
def test_codes(
    metal: None,
    halves: None,
    outputs: int,
    dims: int,
    group_size: int,
    dtype: mx.Dtype,
    is_sorted: bool,
) -> None:
    x, indices, starts = rows_for(COUNTS, dims, dtype)
    weight, variant, matrices = codes_of(len(COUNTS), outputs, dims, group_size, dtype)
    with use_backend("metal"):
        got = gather_affine_matmul(
            x, weight, variant, indices, starts=starts if is_sorted else None
        )
    assert got.dtype == mx.float32
    assert relative_error(got, by_formula(x, matrices, indices)) <= TOLERANCE[mx.float32]


@pytest.mark.metal
@pytest.mark.parametrize("is_ternary", [False, True])
def test_whole_numbers_give_the_same_bits(metal: None, halves: None, is_ternary: bool) -> None:
    counts, dims, outputs = (2, 3), 192, 9
    x, indices, starts = rows_for(counts, dims)
    x = mx.round(20 * x)
    with use_backend("metal"):
        if is_ternary:
            weight, matrices = trits_of(len(counts), outputs, dims)
            got = gather_ternary_matmul(x, weight, indices, starts=starts)
        else:
            weight, variant, _ = codes_of(len(counts), outputs, dims, 64, mx.float32)
            scales, biases = mx.full(variant.scales.shape, 0.5), mx.full(variant.scales.shape, -1.0)
            variant = variant._replace(scales=scales, biases=biases)
            got = gather_affine_matmul(x, weight, variant, indices, starts=starts)
            flat = (part.reshape(-1, part.shape[-1]) for part in (weight, scales, biases))
            matrices = np.array(mx.dequantize(*flat, 64, 2), np.float64).reshape(2, outputs, dims)
    assert mx.array_equal(got, by_formula(x, matrices, indices).astype(mx.float32))


@pytest.mark.metal
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38])
def test_what_is_not_finite_stays_in_its_row(metal: None, value: float) -> None:
    x, indices, starts = rows_for(COUNTS, 64)
    weight, matrices = trits_of(len(COUNTS), 8, 64)
    x[3, 5] = value
    with use_backend("metal"):
        got = gather_ternary_matmul(x, weight, indices, starts=starts)
    got, want = np.array(got), np.array(by_formula(x, matrices, indices))
    rest = np.arange(len(got)) != 3
    assert relative_error(mx.array(got[rest]), mx.array(want[rest])) <= TOLERANCE[mx.float32]
    if np.isfinite(value):
        assert relative_error(mx.array(got[3]), mx.array(want[3])) <= TOLERANCE[mx.float32]
    else:
        assert not np.isfinite(got[3]).any()


@pytest.mark.metal
@pytest.mark.parametrize("counts", [(2,) * 8, (16, 0, 0, 1, 1, 9, 0, 5)], ids=["even", "skewed"])
@pytest.mark.parametrize("is_ternary", [False, True])
def test_each_matrix_that_is_named_is_read_once(
    emulated: Emulator, counts: tuple[int, ...], is_ternary: bool
) -> None:
    outputs, dims = 16, 512
    x, indices, starts = rows_for(counts, dims, mx.float16)
    named = sum(count > 0 for count in counts) / len(counts)
    with use_backend("metal"):
        if is_ternary:
            weight, _ = trits_of(len(counts), outputs, dims)
            mx.eval(gather_ternary_matmul(x, weight, indices, starts=starts))
        else:
            weight, variant, _ = codes_of(len(counts), outputs, dims, 128, mx.float16)
            mx.eval(gather_affine_matmul(x, weight, variant, indices, starts=starts))
    *_, record = emulated.records
    assert record.loaded["weight"] == named * weight.nbytes


@pytest.mark.metal
@pytest.mark.parametrize("is_ternary", [False, True])
def test_gradient(metal: None, is_ternary: bool) -> None:
    x, indices, starts = rows_for(COUNTS, 64)
    dy = mx.random.normal((len(x), 8))
    if is_ternary:
        weight, matrices = trits_of(len(COUNTS), 8, 64)
    else:
        weight, variant, matrices = codes_of(len(COUNTS), 8, 64, 32, mx.float32)

    def product(x: mx.array) -> mx.array:
        if is_ternary:
            return gather_ternary_matmul(x, weight, indices, starts=starts)
        return gather_affine_matmul(x, weight, variant, indices, starts=starts)

    with use_backend("metal"):
        _, [dx] = mx.vjp(product, [x], [dy])
    want = np.einsum("rn,rnd->rd", np.array(dy, np.float64), matrices[np.array(indices)])
    assert relative_error(dx, mx.array(want)) <= TOLERANCE[mx.float32]


def experts(variant: str, dims: int = 64) -> MixtureOfExperts:
    """A mixture whose experts hold trits or codes."""
    mx.random.seed(3)

    def linear(inputs: int, outputs: int, bias: bool) -> PackedLinear | QuantizedLinear:
        if variant == "trits":
            layer = PackedLinear(inputs, outputs, has_row_scales=True)
            layer.weight = pack_ternary(mx.random.randint(-1, 2, (outputs, inputs)))
            return layer
        bits = int(variant[0])
        layer = QuantizedLinear(inputs, outputs, False, 64, bits)
        codes = mx.quantize(mx.random.normal((outputs, inputs)) / 8, 64, bits)
        layer.weight, layer.scales, layer.biases = codes
        return layer

    mixer = MixtureOfExperts(dims, hidden_dims=64, num_experts=6, num_chosen=2, linear=linear)
    mx.eval(mixer.parameters())
    return mixer


@pytest.mark.metal
@pytest.mark.parametrize("variant", ["trits", "2 bits", "4 bits"])
# rows that are sorted, and a decoded token
@pytest.mark.parametrize("length", [40, 1])
def test_experts(metal: None, variant: str, length: int) -> None:
    mixer = experts(variant)
    x = mx.random.normal((1, length, 64))
    got = mixer(x)
    with use_backend("reference"):
        want = mixer(x)
    assert relative_error(got, want) <= 10 * TOLERANCE[mx.float32]


# for a decoded token, and for rows that are sorted; trits have a scale for each row of a matrix
LAUNCHES = {"trits": (28, 37), "2 bits": (19, 28), "4 bits": (25, 31)}


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("variant", LAUNCHES)
def test_launches_of_experts(variant: str) -> None:
    """Rows and scales are picked, matrices are not."""
    mixer = experts(variant)
    for length, total in zip((1, 64), LAUNCHES[variant], strict=True):
        x = mx.zeros((1, length, 64), mx.float16)
        mx.eval(x)
        counted = launches(mixer(x))
        of_rows = 3 if length == 64 else 0
        assert counted["Gather"] == of_rows + (3 if variant == "trits" else 0)
        assert counted.total() == total, counted


def sorted_rows() -> None:
    x, indices, starts = rows_for(COUNTS, 520)
    weight, matrices = trits_of(len(COUNTS), 11, 520)
    with use_backend("metal"):
        got = gather_ternary_matmul(x, weight, indices, starts=starts)
    if not relative_error(got, by_formula(x, matrices, indices)) <= TOLERANCE[mx.float32]:
        raise AssertionError


def sorted_codes() -> None:
    x, indices, starts = rows_for(COUNTS, 640)
    weight, variant, matrices = codes_of(len(COUNTS), 11, 640, 64, mx.float16)
    with use_backend("metal"):
        got = gather_affine_matmul(x, weight, variant, indices, starts=starts)
    if not relative_error(got, by_formula(x, matrices, indices)) <= TOLERANCE[mx.float32]:
        raise AssertionError


KERNELS = {sorted_rows: "gather_ternary_matmul", sorted_codes: "gather_affine_matmul"}
FAULTS = {
    "the last row left out": Fault(sorted_rows, "if (row < rows)", "if (false)", 0),
    "rows of another matrix": Fault(sorted_rows, "named[place + 1] - start", "2", 0),
    "the first matrix for all": Fault(sorted_rows, "matrix) * outputs", "0) * outputs", 0),
    "outputs after the last": Fault(sorted_rows, "first + lane < outputs", "true", 0),
    "inputs after the last": Fault(sorted_rows, "16 * at + n < dims", "true", 0),
    "codes for trits": Fault(sorted_rows, "stored - total", "stored", 0),
    "scales of another group": Fault(sorted_codes, "16 * at / GROUP_SIZE", "0", 0),
    "biases left out": Fault(
        sorted_codes, "fma(bias[n], own[r], sums[n][r][0])", "sums[n][r][0]", 0
    ),
}


@pytest.mark.sample(2)
@pytest.mark.metal
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    assert_seen(fault, KERNELS[fault.check], emulated, monkeypatch)


@pytest.mark.parametrize(
    "starts", [mx.array([0, 1]), mx.zeros((6,)), mx.array([[0] * 6])], ids=["few", "floats", "axes"]
)
def test_starts_that_do_not_fit(starts: mx.array) -> None:
    x, indices, _ = rows_for(COUNTS, 64)
    weight, _ = trits_of(len(COUNTS), 8, 64)
    with pytest.raises(ValueError, match=r"^\[gather_ternary_matmul\] 'starts' must be 6 integers"):
        gather_ternary_matmul(x, weight, indices, starts=starts)

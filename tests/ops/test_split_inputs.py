"""Products of few outputs, each computed in parts of its inputs: values, traffic, and when it is so."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import Projection, bit_linear, pack_ternary, packed_width, ternary_matmul
from mlx_mmfree.ops.backend import choice
from mlx_mmfree.ops.backend.dispatch import use_backend
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    check_bad_row,
    check_code_sums,
    check_float_sums,
    check_fused_codes,
    check_fused_sums,
    check_fused_ties,
)
from tests.tolerances import TOLERANCE

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
LONG = 11_008


@pytest.fixture
def split() -> Iterator[None]:
    with choice.use("split"):
        yield


in_parts = pytest.mark.usefixtures("metal", "split")


# one part, and all; then one more step, and a last input alone in its tile
@pytest.mark.sample(2)
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize("dims", [1, 16, 100, 128, 144, 257])
@pytest.mark.parametrize("dtype", [*FLOATS, mx.int8], ids=str)
def test_sums_of_codes_are_exact(dims: int, dtype: mx.Dtype) -> None:
    check_code_sums(49, dims, 33, dtype)


@pytest.mark.sample(2)
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (31, 65), (32, 32), (33, 31), (65, 64)])
def test_sums_for_other_tiles(rows: int, outputs: int) -> None:
    check_code_sums(rows, 300, outputs, mx.float16)
    check_fused_sums(rows, 300, (outputs,), mx.float16)


@pytest.mark.metal
@in_parts
@pytest.mark.parametrize("dims", [63, 600])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_floats(dims: int, dtype: mx.Dtype) -> None:
    check_float_sums(49, dims, 33, dtype)


@pytest.mark.sample(2)
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize("dims", [1, 31, 33, 160, 285])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_codes_of_several_matrices(dims: int, dtype: mx.Dtype) -> None:
    check_fused_sums(49, dims, (33, 8, 65), dtype)


@pytest.mark.sample(2)
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize("outputs", [(1,), (4, 70, 64, 4), (5, 4, 40, 4, 6)], ids=str)
def test_sums_of_codes_of_other_matrices(outputs: tuple[int, ...]) -> None:
    check_fused_sums(50, 285, outputs, mx.float32)


@pytest.mark.metal
@in_parts
def test_codes() -> None:
    check_fused_codes(49, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2)
    check_fused_ties("half_away", rows=49)
    check_bad_row(True, None, None, rows=49)


@pytest.mark.exhaustive
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize(("rows", "dims", "outputs"), [(32, LONG, 32), (20, LONG - 3, 33)])
def test_long_inputs_against_float64(rows: int, dims: int, outputs: int) -> None:
    check_long_inputs(rows, dims, outputs)


@pytest.mark.slow
@pytest.mark.metal
@in_parts
@pytest.mark.parametrize(
    ("rows", "dims", "outputs"),
    [(64, 2560, 256), (100, 2048, 512), (64, LONG, 256), (70, LONG - 3, 509)],
)
def test_keys_and_values_of_published_models_against_float64(
    rows: int, dims: int, outputs: int
) -> None:
    check_long_inputs(rows, dims, outputs)


def check_long_inputs(rows: int, dims: int, outputs: int) -> None:
    random = np.random.default_rng(dims + outputs)
    trits = random.integers(-1, 2, (outputs, dims))
    weight = pack_ternary(mx.array(trits))
    # of one sign, so that the sums are as large as they get
    codes = random.integers(0, 128, (rows, dims))
    sums = codes @ np.abs(trits).T
    ones = pack_ternary(mx.array(np.abs(trits)))
    with use_backend("metal"):
        got = ternary_matmul(mx.array(codes).astype(mx.float16), ones, codes=True)
        assert np.array_equal(np.array(got, np.int64), sums)
        x = random.standard_normal((rows, dims), np.float32)
        error = np.abs(
            np.array(ternary_matmul(mx.array(x), weight)) - x.astype(np.float64) @ trits.T
        )
        assert error.max() <= TOLERANCE[mx.float32] * np.abs(x @ trits.T).max()
        # the scale of a row with the code 127 is 1
        codes[:, 5] = 127
        got = bit_linear(mx.array(codes).astype(mx.float32), [Projection(weight, mx.array([0.5]))])
        assert np.array_equal(2 * np.array(got, np.float64), codes @ trits.T)


@pytest.mark.metal
@pytest.mark.usefixtures("split")
def test_the_order_of_threads_does_not_matter(emulated: Emulator) -> None:
    mx.random.seed(0)
    x, weight = mx.random.normal((40, 600)), pack_ternary(mx.random.randint(-1, 2, (40, 600)))
    found = []
    for seed in (0, 1, 12345):
        emulated.seed = seed
        check_fused_sums(40, 285, (33, 5), mx.float32)
        with use_backend("metal"):
            found.append(ternary_matmul(x, weight))
    # sums of floats, which depend on their order
    assert mx.array_equal(found[0], found[1]) and mx.array_equal(found[0], found[2])


@pytest.mark.exhaustive
@pytest.mark.metal
@pytest.mark.parametrize(
    ("name", "threadgroups", "threads", "tile"), [("tiles", 4, 128, 64), ("split", 16, 256, 32)]
)
def test_few_outputs_give_more_simd_groups(
    emulated: Emulator, name: str, threadgroups: int, threads: int, tile: int
) -> None:
    """Keys of a short prompt: with 8 times the SIMD groups, of which each has an eighth of the steps."""
    rows, dims, outputs = 64, 512, 256
    with choice.use(name):
        check_code_sums(rows, dims, outputs, mx.float16)
        check_fused_sums(rows, dims, (outputs,), mx.float16)
    [_, sums, *_, fused] = emulated.records
    for record, activations, width, result in (
        (sums, "x", dims * 2, {"out": rows * outputs * 4}),
        (fused, "codes", dims, {"out": rows * outputs * 2}),
    ):
        assert (record.threadgroups, record.threads) == (threadgroups, threads)
        # of the launch alone, and no parts of sums
        assert record.stored == result
        assert record.loaded[activations] == rows * width * outputs // tile
        weights = record.loaded["weight" if activations == "x" else "weight0"]
        assert weights == outputs * packed_width(dims) * 4 * rows // tile
        # of 32 KB
        assert record.shared_bytes == {"tiles": 9_216, "split": 20_480}[name]


@pytest.mark.metal
@pytest.mark.usefixtures("split")
def test_memory_of_float_tiles(emulated: Emulator) -> None:
    check_float_sums(33, 100, 33, mx.float32)
    assert (emulated.records[-1].threads, emulated.records[-1].shared_bytes) == (128, 20_480)

"""The Metal kernels of fused operations: values, and how much memory they read and write."""

import importlib

import mlx.core as mx
import pytest

from mlx_mmfree.ops import (
    Projection,
    bit_linear,
    gated_rms_norm,
    mlgru_step,
    pack_ternary,
    use_backend,
)
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.ops.backend.metal_functions import keeps_half_denormals, without_halves
from mlx_mmfree.ops.bit_linear import Options
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_tuning import Tuning, blocks
from mlx_mmfree.ops.inspection import metal_kernels
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    CODE_OPTIONS,
    assert_close,
    check_bad_row,
    check_fused_codes,
    check_fused_floats,
    check_fused_sums,
    check_fused_ties,
    check_gated_norm,
    check_step,
    random_trits,
)
from tests.tolerances import GRADIENT_TOLERANCE

pytestmark = [pytest.mark.metal, pytest.mark.usefixtures("metal")]

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
SIZES = [1, 31, 33, 63, 100, 2064, 5460]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_codes_are_exact(rows: int, dims: int, dtype: mx.Dtype) -> None:
    check_fused_sums(rows, dims, (33, 8, 5), dtype)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [2, 3, 4, 6, 7, 8, 9, 23, 48, 49])
def test_sums_for_other_numbers_of_rows(rows: int) -> None:
    check_fused_sums(rows, 1100, (33,), mx.float32)


def test_more_words_than_32_bits_count_are_left_to_plain_operations() -> None:
    # of these, nothing is computed
    few, many = (mx.zeros((rows, 2**11), mx.uint32) for rows in (2**20 - 1, 2**20))
    x, fused = mx.zeros((1, 2**15)), importlib.import_module("mlx_mmfree.ops.bit_linear.metal")
    ways = [fused._way(x, (Projection(each, mx.ones(1)),), Options()) for each in (few, many)]
    assert ways == ["groups", None]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "outputs", [(32,), (1,), (4, 70, 4, 4), (5, 4, 40, 4, 6), (4,) * 9], ids=str
)
def test_sums_for_other_matrices(outputs: tuple[int, ...]) -> None:
    check_fused_sums(2, 63, outputs, mx.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("rows", [1, 4])
def test_sums_on_a_device_that_flushes_denormal_halves(rows: int, dims: int) -> None:
    with without_halves():
        check_fused_sums(rows, dims, (33, 8, 5), mx.float16)
        check_fused_codes(rows, dims, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2)


def test_a_device_that_flushes_denormal_halves_is_recognised(
    emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_checks", {})
    flushing = "HALVES ? (word & 0u) :"
    emulated.edit = lambda text: text.replace("HALVES ? word :", flushing)
    with pytest.warns(RuntimeWarning, match=r"half_denormals\(\) is switched off"):
        check_fused_sums(2, 100, (33, 5), mx.float16)
    assert not keeps_half_denormals()
    assert metal_kernels()["half_denormals()"] is not None


@pytest.mark.parametrize("dims", [2**16, 2**16 + 16])
@pytest.mark.parametrize("code", [127, -127])
def test_the_largest_sums_are_exact(dims: int, code: int) -> None:
    """The sum of products with codes of 2, which trits are before 1 is taken off, is 2^24 at most."""
    signs = mx.where(mx.arange(dims) % 3 == 1, -1, 1) * mx.array([[1], [0]]) + mx.array([[0], [1]])
    weight = pack_ternary(signs)
    with use_backend("metal"):
        got = bit_linear(mx.full((1, dims), float(code)), [Projection(weight, mx.array([1.0]))])
    assert got.tolist() == [(code * signs.sum(axis=1)).tolist()]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("gate", "norm_eps", "eps", "rounding"), CODE_OPTIONS)
def test_codes(
    gate: Activation | None, norm_eps: float | None, eps: float | None, rounding: Rounding
) -> None:
    check_fused_codes(2, 100, mx.float32, gate=gate, norm_eps=norm_eps, eps=eps, rounding=rounding)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_for_other_sizes(dims: int, dtype: mx.Dtype) -> None:
    check_fused_codes(3, dims, dtype, gate="silu", norm_eps=1e-2, eps=1e-2, rounding="half_away")


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_exact_ties(rounding: Rounding) -> None:
    check_fused_ties(rounding)


@pytest.mark.sample(2)
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("dims", [63, 5460])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_without_quantisation(dims: int, dtype: mx.Dtype, gate: Activation | None) -> None:
    check_fused_floats(5, dims, dtype, gate)


def test_arrays_that_are_not_contiguous() -> None:
    mx.random.seed(0)
    x = mx.random.normal((100, 2, 3)).transpose(1, 2, 0)[:, ::-1]
    weight = pack_ternary(random_trits(66, 100))[::2]
    norm, residual = mx.ones((100, 2))[:, 0] * 2, mx.random.normal((33, 3, 2)).T
    arguments = {"norm": norm, "norm_eps": 1e-2, "residual": residual, "quantize": False}
    with use_backend("metal"):
        got = bit_linear(x, [Projection(weight, mx.ones((33, 2))[:, 1])], **arguments)
    with use_backend("reference"):
        want = bit_linear(x, [Projection(weight, mx.ones((33,)))], **arguments)
    assert_close(got, want, 1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("gate", "eps"), [(None, None), ("silu", 1e-6), ("relu2", None)])
def test_a_bad_row_stays_alone(quantize: bool, gate: Activation | None, eps: float | None) -> None:
    check_bad_row(quantize, gate, eps)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_step(dims: int, dtype: mx.Dtype) -> None:
    check_step(4, dims, dtype)


@pytest.mark.parametrize(
    ("is_bounded", "is_masked"), [(True, False), (False, True), (False, False)]
)
def test_step_without_bound_or_mask(is_bounded: bool, is_masked: bool) -> None:
    check_step(2, 100, mx.float32, is_bounded=is_bounded, is_masked=is_masked)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("length", "dims"), [(2, 1), (5, 100), (64, 33), (130, 31), (200, 65)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_positions(length: int, dims: int, dtype: mx.Dtype) -> None:
    check_step(2, dims, dtype, length=length, has_starts=True)


def test_positions_with_indices_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("mlx_mmfree.ops.linear_scan"), "_MANY_INDICES", 0)
    check_step(2, 40, mx.float16, length=130, has_starts=True)


@pytest.mark.parametrize("dims", [2048, 2560])
def test_positions_of_published_models(dims: int) -> None:
    check_step(1, dims, mx.float16, length=9, is_masked=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_bounded", [True, False])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("has_starts", [True, False])
def test_positions_without_some_arrays(is_bounded: bool, is_masked: bool, has_starts: bool) -> None:
    check_step(
        *(2, 40, mx.float32),
        length=70,
        is_bounded=is_bounded,
        is_masked=is_masked,
        has_starts=has_starts,
    )


def test_gradient_of_positions() -> None:
    mx.random.seed(0)
    gates = mx.random.normal((2, 70, 3 * 40))
    state, weight = mx.random.normal((2, 40)), 1 + 0.1 * mx.random.normal((40,))
    bound = mx.random.uniform(shape=(40,))
    numbers = mx.arange(2 * 70).reshape(2, 70)
    given = {"valid": numbers % 5 != 1, "starts": numbers % 9 == 4, "eps": 1e-3}

    def loss(gates: mx.array, state: mx.array, weight: mx.array, bound: mx.array) -> mx.array:
        y, last = mlgru_step(gates, state, weight, lower_bound=bound, **given)
        return y.square().sum() + (last * mx.arange(40)).sum()

    found = {}
    for backend in ("metal", "reference"):
        with use_backend(backend):
            found[backend] = mx.grad(loss, argnums=(0, 1, 2, 3))(gates, state, weight, bound)
    for got, want in zip(*found.values(), strict=True):
        assert_close(got, want, GRADIENT_TOLERANCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gated_norm(dims: int, dtype: mx.Dtype) -> None:
    mx.random.seed(dims)
    gate, h = mx.random.normal((2, 2, 3, dims)).astype(dtype)
    check_gated_norm(gate.swapaxes(0, 1), h.swapaxes(0, 1), 1 + 0.1 * mx.random.normal((dims,)))


def test_empty_arrays() -> None:
    weight = pack_ternary(random_trits(8, 32))
    with use_backend("metal"):
        y = bit_linear(mx.ones((0, 32)), [Projection(weight, mx.ones((1,)))])
        assert y.shape == (0, 8)
        assert gated_rms_norm(mx.ones((0, 3)), mx.ones((0, 3)), mx.ones((3,)), eps=1.0).size == 0
        y, last = mlgru_step(mx.ones((2, 0, 9)), mx.ones((2, 3)), mx.ones((3,)), eps=1.0)
        assert (y.shape, last.tolist()) == ((2, 0, 3), [[1.0] * 3] * 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_the_order_of_threads_does_not_matter(emulated: Emulator, seed: int) -> None:
    emulated.seed = seed
    check_fused_sums(3, 1100, (33, 5), mx.float32)
    check_fused_codes(2, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2)
    check_step(3, 100, mx.float32)
    check_step(2, 40, mx.float32, length=130, has_starts=True)
    check_gated_norm(*mx.random.normal((2, 2, 300)), mx.ones((300,)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (3, 1), (5, 1), (6, 2), (8, 2)])
@pytest.mark.parametrize("dims", [100, 2100])
def test_a_group_of_rows_reads_each_packed_word_once(
    emulated: Emulator, rows: int, groups: int, dims: int
) -> None:
    outputs = (33, 40)
    check_fused_sums(rows, dims, outputs, mx.float16)
    record = emulated.records[-1]
    tuning = Tuning.of(Variant.of(Options()), rows, dims, outputs)
    own = tuning.outputs
    for n, count in enumerate(outputs):
        # the last words of a row may hold padding alone; the last SIMD group reads outputs of the one
        # before it again
        assert record.loaded[f"weight{n}"] == groups * -(-count // own) * own * -(-dims // 16) * 4
    # each threadgroup reads the input for its statistics and for its codes
    of_each = blocks(outputs, own * tuning.simd_groups)
    assert record.threadgroups == groups * of_each
    assert record.loaded["x"] == of_each * 2 * rows * dims * 2
    assert record.loaded["residual"] == rows * sum(outputs) * 2
    assert record.stored == {"out": rows * sum(outputs) * 2}


def test_traffic_of_norms(emulated: Emulator) -> None:
    check_fused_codes(2, 100, mx.float32, norm_eps=1e-2, eps=1e-2)
    record = emulated.records[-1]
    # each threadgroup reads the norms of one of the two matrices, for statistics and for codes
    read = record.threadgroups * 2 * 100 * 4
    assert record.loaded["norm"] == read
    assert record.loaded["own_norm0"] + record.loaded["own_norm1"] == read
    assert min(record.loaded["own_norm0"], record.loaded["own_norm1"]) > 0


def test_traffic_of_a_step(emulated: Emulator) -> None:
    check_step(3, 100, mx.float16, is_masked=False)
    record = emulated.records[-1]
    # the output gate is read once more, for its norm
    assert record.loaded["gates"] == 3 * 4 * 100 * 2
    assert record.loaded["state"] == 3 * 100 * 4
    assert record.stored == {"out": 3 * 100 * 2, "last": 3 * 100 * 4}


def test_traffic_of_positions(emulated: Emulator) -> None:
    check_step(2, 40, mx.float16, length=130, is_masked=False)
    scan, output = emulated.records[-2:]
    count = 2 * 130 * 40
    # the gates of the first of two chunks are read once more, for what it does to a state
    assert scan.loaded["gates"] == (count + 2 * 65 * 40) * 2 * 2
    assert scan.stored == {"states": count * 4, "last": 2 * 40 * 4}
    # the output gate is read once more, for its norm
    assert output.loaded["gate"] == count * 2 * 2
    assert output.loaded["h"] == count * 4
    assert output.stored == {"out": count * 2}


def test_traffic_of_a_gated_norm(emulated: Emulator) -> None:
    check_gated_norm(*mx.random.normal((2, 3, 300)).astype(mx.float16), mx.ones((300,)))
    record = emulated.records[-1]
    assert record.loaded["gate"] == 2 * 3 * 300 * 2
    assert record.loaded["h"] == 3 * 300 * 2
    assert record.stored == {"out": 3 * 300 * 2}

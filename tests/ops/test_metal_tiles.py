"""`bit_linear` on Metal for many rows: values, launches, and how much memory they read and write."""

import mlx.core as mx
import pytest

from mlx_mmfree.ops import Projection, bit_linear, pack_ternary, use_backend
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from tests.emulator.emulator import Emulator
from tests.ops.kernel_checks import (
    CODE_OPTIONS,
    assert_close,
    check_bad_row,
    check_fused_codes,
    check_fused_sums,
    check_fused_ties,
    random_trits,
)
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE

pytestmark = [pytest.mark.metal, pytest.mark.usefixtures("metal")]

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", [1, 31, 33, 63, 100, 1070])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_codes_are_exact(dims: int, dtype: mx.Dtype) -> None:
    check_fused_sums(70, dims, (33, 8, 5), dtype)


@pytest.mark.parametrize("rows", [49, 63, 64, 65, 129])
def test_sums_for_other_numbers_of_rows(rows: int) -> None:
    check_fused_sums(rows, 100, (33,), mx.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "outputs",
    [(64,), (65,), (1,), (4, 70, 64, 4), (128, 129, 5), (5, 4, 40, 4, 6), (4,) * 9],
    ids=str,
)
def test_sums_for_other_matrices(outputs: tuple[int, ...]) -> None:
    check_fused_sums(50, 63, outputs, mx.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", [2048, 2560, 5632, 6912])
def test_sums_for_the_inputs_of_published_models(dims: int) -> None:
    check_fused_sums(49, dims, (5, 9), mx.float16)


@pytest.mark.sample(2)
@pytest.mark.parametrize("outputs", [(2048,), (2560, 640, 640), (6912,)], ids=str)
def test_sums_for_the_outputs_of_published_models(outputs: tuple[int, ...]) -> None:
    check_fused_sums(49, 33, outputs, mx.bfloat16)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("gate", "norm_eps", "eps", "rounding"), CODE_OPTIONS)
def test_codes(
    gate: Activation | None, norm_eps: float | None, eps: float | None, rounding: Rounding
) -> None:
    check_fused_codes(50, 100, mx.float32, gate=gate, norm_eps=norm_eps, eps=eps, rounding=rounding)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", [1, 33, 300, 2560])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_for_other_sizes(dims: int, dtype: mx.Dtype) -> None:
    check_fused_codes(49, dims, dtype, gate="silu", norm_eps=1e-2, eps=1e-2, rounding="half_away")


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_exact_ties(rounding: Rounding) -> None:
    check_fused_ties(rounding, rows=49)


@pytest.mark.parametrize(("gate", "eps"), [(None, None), ("silu", 1e-6), ("relu2", None)])
def test_a_bad_row_stays_alone(gate: Activation | None, eps: float | None) -> None:
    check_bad_row(True, gate, eps, rows=49)


def test_nan_in_a_norm_spoils_its_matrix_alone() -> None:
    weight = pack_ternary(random_trits(40, 100))
    norms = mx.ones((2, 100))
    norms[1, 70] = mx.nan
    projections = [Projection(weight, mx.ones((1,)), norm) for norm in norms]
    with use_backend("metal"):
        got = bit_linear(mx.ones((49, 100)), projections, eps=1e-6)
    assert mx.isfinite(got[:, :40]).all()
    assert mx.isnan(got[:, 40:]).all()


def test_arrays_that_are_not_contiguous() -> None:
    mx.random.seed(0)
    x = mx.random.normal((100, 2, 30)).transpose(1, 2, 0)[:, ::-1]
    weight = pack_ternary(random_trits(66, 100))[::2]
    norm, residual = mx.ones((100, 2))[:, 0] * 2, mx.random.normal((33, 30, 2)).T
    arguments = {"norm": norm, "norm_eps": 1e-2, "residual": residual}
    with use_backend("metal"):
        got = bit_linear(x, [Projection(weight, mx.ones((33, 2))[:, 1])], **arguments)
    with use_backend("reference"):
        want = bit_linear(x, [Projection(weight, mx.ones((33,)))], **arguments)
    assert_close(got, want, TOLERANCE[mx.float32])


def test_gradient() -> None:
    mx.random.seed(0)
    x, residual = mx.random.normal((50, 128)), mx.random.normal((50, 38))
    weights = [pack_ternary(random_trits(count, 64)) for count in (33, 5)]
    norms = list(1 + 0.1 * mx.random.normal((3, 64)))

    def loss(x: mx.array, residual: mx.array, norm: mx.array, own_norm: mx.array) -> mx.array:
        projections = [
            Projection(weight, mx.array([0.5]), own)
            for weight, own in zip(weights, (own_norm, norms[2]), strict=True)
        ]
        options = {"gate": "silu", "norm": norm, "norm_eps": 1e-3, "eps": 1e-3}
        return bit_linear(x, projections, residual=residual, **options).square().sum()

    found = {}
    for backend in ("metal", "reference"):
        with use_backend(backend):
            gradient = mx.grad(loss, argnums=(0, 1, 2, 3))
            found[backend] = gradient(x, residual, *norms[:2])
    for got, want in zip(*found.values(), strict=True):
        assert_close(got, want, GRADIENT_TOLERANCE)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_order_of_threads_does_not_matter(emulated: Emulator, seed: int) -> None:
    emulated.seed = seed
    check_fused_sums(65, 100, (33, 5), mx.float32)
    check_fused_codes(49, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2)


def test_traffic(emulated: Emulator) -> None:
    rows, dims, outputs = 70, 100, (70, 8)
    check_fused_sums(rows, dims, outputs, mx.float16)
    codes, products = emulated.records[-2:]
    # once for the statistics and once for the codes
    assert codes.loaded["x"] == 2 * rows * dims * 2
    # rows of codes fill four tiles of 32
    assert codes.stored == {"codes": rows * 128, "scales": rows * 4}
    # two tiles of rows and three of outputs
    assert products.loaded["codes"] == 3 * 2 * 64 * 128
    assert products.loaded["weight0"] == 2 * 2 * 64 * 8 * 4
    assert products.loaded["weight1"] == 2 * 64 * 8 * 4
    assert products.loaded["residual"] == rows * sum(outputs) * 2
    assert products.stored == {"out": rows * sum(outputs) * 2}


def test_a_set_of_codes_for_each_norm(emulated: Emulator) -> None:
    check_fused_codes(49, 100, mx.float32, norm_eps=1e-2)
    shared = emulated.records[-2]
    check_fused_codes(49, 100, mx.float32, norm_eps=1e-2, eps=1e-2)
    own = emulated.records[-2]
    assert shared.stored == {"codes": 49 * 128, "scales": 49 * 4}
    assert own.stored == {name: 2 * stored for name, stored in shared.stored.items()}
    assert own.loaded["x"] == shared.loaded["x"] == 2 * 49 * 100 * 4

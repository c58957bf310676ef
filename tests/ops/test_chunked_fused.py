"""The fused operations in few plain ones: exact sums, codes, rows that stay alone, kept constants."""

import io

import mlx.core as mx
import pytest

from mlx_mmfree.ops import Projection, bit_linear, mlgru_step, pack_ternary, use_backend
from mlx_mmfree.ops.activations import Activation
from mlx_mmfree.ops.backend.compilation import compiled
from mlx_mmfree.ops.bit_linear import Options, definition
from mlx_mmfree.ops.rms_norm_quantize import Rounding
from mlx_mmfree.ops.unpacked import UnpackedMatrices
from tests.ops.kernel_checks import (
    CODE_OPTIONS,
    assert_close,
    assert_same,
    check_bad_row,
    check_fused_codes,
    check_fused_floats,
    check_fused_sums,
    check_fused_ties,
    check_step,
    random_trits,
)

pytestmark = [
    pytest.mark.usefixtures("chunked"),
    pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="for a CPU"),
]

FLOATS = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("outputs", [(33,), (32, 32, 32), (33, 8, 5), (640, 320, 320)], ids=str)
@pytest.mark.parametrize(("rows", "dims"), [(1, 1), (1, 63), (1, 5460), (5, 100), (16, 33)])
def test_sums_of_codes_are_exact(rows: int, dims: int, outputs: tuple[int, ...]) -> None:
    check_fused_sums(rows, dims, outputs, mx.float32, backend="chunked")


@pytest.mark.parametrize(("gate", "norm_eps", "eps", "rounding"), CODE_OPTIONS)
@pytest.mark.parametrize("rows", [1, 3])
def test_codes(
    rows: int,
    gate: Activation | None,
    norm_eps: float | None,
    eps: float | None,
    rounding: Rounding,
) -> None:
    options = {"gate": gate, "norm_eps": norm_eps, "eps": eps, "rounding": rounding}
    check_fused_codes(rows, 100, mx.float32, **options, backend="chunked")


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
def test_exact_ties(rounding: Rounding) -> None:
    check_fused_ties(rounding, backend="chunked")


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_without_quantisation(dtype: mx.Dtype, gate: Activation | None) -> None:
    check_fused_floats(5, 63, dtype, gate, backend="chunked")


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("gate", "eps"), [(None, None), ("silu", 1e-6), ("relu2", None)])
def test_a_bad_row_stays_alone(quantize: bool, gate: Activation | None, eps: float | None) -> None:
    check_bad_row(quantize, gate, eps, backend="chunked")


@pytest.mark.parametrize("is_bounded", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_step(dtype: mx.Dtype, is_bounded: bool) -> None:
    check_step(4, 33, dtype, is_bounded=is_bounded, is_masked=not is_bounded, backend="chunked")


def test_a_row_has_the_same_bits_whatever_the_number_of_rows() -> None:
    x, state = mx.random.normal((7, 1, 3 * 96)), mx.random.normal((7, 96))
    norm = 1 + 0.1 * mx.random.normal((4, 96))
    projections = [
        Projection(pack_ternary(random_trits(64, 96)), mx.array([0.3]), own) for own in norm[1:]
    ]

    def both(x: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
        y = bit_linear(x[..., :96], projections, eps=1e-6, norm=norm[0], norm_eps=1e-6)
        return y, mlgru_step(x, state, norm[0], eps=1e-6)[0]

    with use_backend("chunked"):
        for got, want in zip(both(x[2:3], state[2:3]), both(x, state), strict=True):
            assert_same(got[0], want[2])


@pytest.mark.parametrize("rounding", ["half_even", "half_away"])
@pytest.mark.parametrize("own", [True, False])
def test_the_bits_are_those_of_the_definition(own: bool, rounding: Rounding) -> None:
    x, residual = mx.random.normal((5, 96)), mx.random.normal((5, 192))
    norm = 1 + 0.1 * mx.random.normal((4, 96))
    projections = [
        Projection(pack_ternary(random_trits(64, 96)), mx.array([0.3]), each if own else None)
        for each in norm[1:]
    ]
    options = {"eps": 1e-6 if own else None, "norm": norm[0], "norm_eps": 1e-6}
    results = []
    for backend in ("chunked", "reference"):
        with use_backend(backend):
            results.append(
                bit_linear(x, projections, rounding=rounding, residual=residual, **options)
            )
    assert_same(*results)


def test_without_space_for_floats_it_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    none = UnpackedMatrices(0)
    monkeypatch.setattr(definition, "unpacked_matrices", lambda: none)
    projections = (Projection(pack_ternary(random_trits(4, 32)), mx.ones((1,))),)
    for rows, reason in ((1, "no space"), (17, "more than 16")):
        assert reason in (
            definition.chunked_unsupported(mx.ones((rows, 32)), projections, Options()) or ""
        )


def test_a_compiled_step_takes_new_activations() -> None:
    norm = 1 + 0.1 * mx.random.normal((64,))
    projection = Projection(pack_ternary(random_trits(48, 64)), mx.array([0.3]), norm)
    options = {"eps": 1e-6, "norm": norm, "norm_eps": 1e-6, "rounding": "half_away"}

    def step(x: mx.array) -> mx.array:
        return bit_linear(x, [projection], **options)

    with use_backend("chunked"):
        repeated = compiled(step)
        for seed in range(3):
            x = mx.random.normal((1, 64), key=mx.random.key(seed))
            assert_close(repeated(x), step(x), 1e-6)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(("eps", "sets"), [(None, 1), (1e-6, 3)])
def test_projections_of_one_input_share_their_codes(
    backend: str, eps: float | None, sets: int
) -> None:
    norm = None if eps is None else mx.ones((32,))
    # their sizes differ, so that those with norms of their own are computed one by one
    projections = [
        Projection(pack_ternary(random_trits(outputs, 32)), mx.ones((1,)), norm)
        for outputs in (32, 16, 16)
    ]
    graph = io.StringIO()
    with use_backend(backend):
        mx.export_to_dot(graph, bit_linear(mx.ones((1, 32)), projections, eps=eps))
    # each set computes the largest value in a row once
    assert graph.getvalue().count('"Max"') == sets

"""Which text of the Metal kernel for few rows computes a call, and the values of each."""

from importlib import import_module

import mlx.core as mx
import pytest

from mlx_mmfree.ops import Projection, pack_ternary
from mlx_mmfree.ops.bit_linear import Options, metal_tuning
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_tuning import SIMD_GROUPS, Tuning
from tests.ops.kernel_checks import check_fused_codes, check_fused_sums

VARIANT = Variant.of(Options(eps=1e-6))
CORES = ((8, 20), (40,), (80,))
# of MMfreeLM-370M, gates, output, gate and up, down: inputs, outputs
LAYER = ((1024, (1024,) * 3), (1024, (1024,)), (1024, (5632,)), (2816, (1024,)))


def every(rows: int) -> list[tuple[int, int]]:
    """The outputs of a SIMD group with the SIMD groups of a threadgroup, as they may be chosen."""
    most = metal_tuning.MOST_OUTPUTS.get(rows, metal_tuning.MOST_OUTPUTS_OF_MORE_ROWS)
    return [(own, count) for own in range(1, most + 1) for count in SIMD_GROUPS]


@pytest.mark.metal
@pytest.mark.sample(2, of="rows")
@pytest.mark.parametrize(
    ("rows", "outputs", "simd_groups"),
    [(rows, *choice) for rows in range(1, 6) for choice in every(rows)],
)
def test_every_text_computes_exact_sums(
    metal: None, rows: int, outputs: int, simd_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forced(variant: Variant, rows: int, dims: int, of_each: list[int]) -> Tuning:
        # no more than the smallest matrix has
        own = min(outputs, *of_each)
        return usual(variant, rows, dims, of_each)._replace(outputs=own, simd_groups=simd_groups)

    usual = Tuning.of
    monkeypatch.setattr(metal_tuning.Tuning, "of", forced)
    # matrices that fill threadgroups, end within one, and have no more than a SIMD group's outputs
    sizes = (2 * outputs * simd_groups, outputs * simd_groups + 1, outputs)
    check_fused_sums(rows, 1100, sizes, mx.float16)
    check_fused_codes(rows, 300, mx.float32, gate="silu", norm_eps=1e-2, eps=1e-2)


@pytest.mark.metal
@pytest.mark.parametrize("cores", CORES, ids=str)
def test_sums_as_each_kind_of_chip_has_them(
    metal: None, cores: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metal_tuning, "cores", lambda: cores)
    check_fused_sums(1, 1024, (1024, 1024, 1024), mx.float16)
    check_fused_sums(1, 2816, (1024,), mx.float16)


def test_an_ultra_chip_has_smaller_threadgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_tuning, "keeps_half_denormals", lambda: True)
    found = []
    for cores in CORES:
        monkeypatch.setattr(metal_tuning, "cores", lambda cores=cores: cores)
        tunings = [Tuning.of(VARIANT, 1, *shape) for shape in LAYER]
        found.append([each.outputs * each.simd_groups for each in tunings])
    assert found[2] == [40, 16, 72, 16]
    assert all(many >= few for many, few in zip(found[0], found[2], strict=True))


def test_five_rows_read_the_words_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal_tuning, "keeps_half_denormals", lambda: True)
    rows = [Tuning.of(VARIANT, count, 1024, [1024]).rows for count in range(1, 12)]
    assert rows == [1, 2, 3, 4, 5, 3, 4, 4, 5, 5, 4]


def test_several_groups_of_rows_have_the_text_of_most_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metal_tuning, "keeps_half_denormals", lambda: True)
    texts = {Tuning.of(VARIANT, rows, 1024, [1024]) for rows in (10, 15, 31, 48)}
    assert [(each.rows, each.outputs, each.simd_groups) for each in texts] == [(5, 4, 8)]


def test_a_small_matrix_has_no_more_outputs_than_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metal_tuning, "keeps_half_denormals", lambda: True)
    assert Tuning.of(VARIANT, 1, 1024, [4096, 3]).outputs == 3


def test_norms_of_several_dtypes_are_left_to_plain_operations() -> None:
    weight = pack_ternary(mx.ones((8, 32)))
    projections = tuple(
        Projection(weight, mx.ones((1,)), mx.ones((32,), dtype))
        for dtype in (mx.float32, mx.float16)
    )
    metal = import_module("mlx_mmfree.ops.bit_linear.metal")
    reason = metal.unsupported(mx.ones((1, 32)), projections, Options(eps=1e-6))
    assert reason == "norms of projections have several dtypes"

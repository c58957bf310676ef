"""Projections of one input, merged as they are on Metal."""

from copy import deepcopy

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.channel_mixers import SwiGLU
from mlx_mmfree.layers.fusing import columns
from mlx_mmfree.layers.fusing import inputs as products
from mlx_mmfree.layers.matrix import parameters
from mlx_mmfree.layers.merged import MergedLinears, merge_projections, merged_parts
from mlx_mmfree.layers.rotated import RotatedLinear
from mlx_mmfree.ops.backend import dispatch
from mlx_mmfree.token_mixers import GQA, GatedDeltaNet
from tests.tolerances import TOLERANCE, relative_error


def linears(kind: str) -> list[nn.Module]:
    mx.random.seed(3)
    made: list[nn.Module] = [nn.Linear(64, n, bias=False) for n in (8, 24, 5)]
    if kind == "codes":
        made = [linear.to_quantized(32, 4) for linear in made]
    if kind == "rotated":
        codes = [linear.to_quantized(32, 4) for linear in made]
        made = []
        for linear in codes:
            own = RotatedLinear(64, linear["weight"].shape[0], group_size=32, bits=4, block=64)
            for name in ("weight", "scales", "biases"):
                own[name] = linear[name]
            made.append(own)
    return made


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joins where there is no Metal."""
    monkeypatch.setattr(dispatch, "metal_unavailable", lambda: None)


@pytest.mark.parametrize("kind", ["floats", "codes", "rotated"])
def test_results_stand_side_by_side(kind: str) -> None:
    given, x = linears(kind), mx.random.normal((2, 3, 64))
    want = products(x, given)
    own = [parameters(linear) for linear in given]
    merged = MergedLinears(given)
    object.__setattr__(given[0], "merged", merged)
    (got,) = products(x, given)
    assert relative_error(got, mx.concatenate(want, axis=-1)) <= TOLERANCE[mx.float32]
    for linear, arrays in zip(given, own, strict=True):
        assert all(mx.array_equal(linear[name], array) for name, array in arrays.items())


def test_other_weights_are_computed_with() -> None:
    given, x = linears("floats"), mx.random.normal((1, 64))
    object.__setattr__(given[0], "merged", MergedLinears(given))
    given[1].weight = 2 * given[1].weight
    want = [x @ linear.weight.T for linear in given]
    for got, expected in zip(products(x, given), want, strict=True):
        assert relative_error(got, expected) <= TOLERANCE[mx.float32]
    # the old weights are not kept
    assert "merged" not in vars(given[0])
    assert [count for _, count in merged_parts(given)] == [1, 1, 1]


def test_the_memory_is_that_of_the_linears(joins: None) -> None:
    model = SwiGLU(256, hidden_dims=1024)
    mx.eval(model.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    merge_projections(model)
    assert mx.get_active_memory() <= before + 4096


@pytest.mark.parametrize("is_quantized", [False, True])
def test_mixers_compute_the_same(is_quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(1)
    x = mx.random.normal((2, 5, 64))
    mixers: list[nn.Module] = [
        GQA(64, num_heads=2, num_kv_heads=1, is_gated=True),
        GatedDeltaNet(64, num_heads=2, num_value_heads=4, is_stacked=True),
        SwiGLU(64, hidden_dims=96),
    ]
    for mixer in mixers:
        if is_quantized:
            nn.quantize(mixer, 32, 4)
        mx.eval(mixer.parameters())
        plain = deepcopy(mixer)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "metal_unavailable", lambda: None)
            merge_projections(mixer)
        first = mixer[next(iter(mixer.projections))]
        assert vars(first)["merged"].count == len(mixer.projections)
        got, want = (m(x) for m in (mixer, plain))
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True)
        g, w = next(pairs)
        assert relative_error(g, w) <= TOLERANCE[mx.float32]


@pytest.mark.usefixtures("joins")
def test_unlike_linears_stay_apart() -> None:
    model = SwiGLU(64, hidden_dims=96)
    model.gate_proj = nn.Linear(64, 96, bias=True)
    assert "merged" not in vars(merge_projections(model).gate_proj)
    model = SwiGLU(64, hidden_dims=96)
    model.gate_proj, model.up_proj, _ = linears("rotated")
    model.up_proj.signs = -model.up_proj.signs
    assert "merged" not in vars(merge_projections(model).gate_proj)


def test_nothing_is_merged_on_a_cpu() -> None:
    model = merge_projections(SwiGLU(64, hidden_dims=96))
    assert "merged" not in vars(model.gate_proj)


def test_columns_of_arrays_side_by_side() -> None:
    parts = list(mx.split(mx.arange(10)[None], [3, 4, 8], axis=-1))
    for first, width in ((0, 3), (3, 1), (5, 2), (2, 5), (3, 7)):
        array, begin = columns(parts, first, width)
        assert array[0, begin : begin + width].tolist() == list(range(first, first + width))
    assert columns(parts, 5, 2)[0] is parts[2]

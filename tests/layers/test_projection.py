"""Several linears of one input: together, apart, and after a gate."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.layers import BitLinear
from mlx_mmfree.layers.fusing import Around, beside, inputs, output
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


@pytest.fixture(params=["dense", "with bias", "of two dtypes", "ternary"])
def linears(request: pytest.FixtureRequest) -> list[nn.Module]:
    mx.random.seed(1)
    if request.param == "ternary":
        return [BitLinear(12, 8, norm_eps=1e-6), BitLinear(12, 8, norm_eps=1e-6)]
    made = [nn.Linear(12, 8, bias=request.param == "with bias") for _ in range(2)]
    if request.param == "of two dtypes":
        made[0].set_dtype(mx.bfloat16)
    return made


@pytest.mark.parametrize("rows", [1, 12, 13, 40])
def test_results_lie_one_after_the_other(linears: list[nn.Module], rows: int) -> None:
    x, weight = mx.random.normal((1, rows, 12)), mx.random.normal((1, rows, 16))
    norm = nn.RMSNorm(12)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = linears

    model = Both()

    def together(model: Both, x: mx.array) -> mx.array:
        return (beside(inputs(x, model.linears, norm, x.dtype)) * weight).sum()

    def one_by_one(model: Both, x: mx.array) -> mx.array:
        y = mx.concatenate([linear(norm(x)) for linear in model.linears], axis=-1)
        return (y.astype(mx.float32) * weight).sum()

    def as_parts(model: Both, x: mx.array) -> mx.array:
        parts = inputs(x, model.linears, norm, x.dtype)
        return (mx.concatenate(list(parts), axis=-1) * weight).sum()

    found = []
    for function in (one_by_one, together, as_parts):
        loss, gradients = nn.value_and_grad(model, function)(model, x)
        gradient = mx.grad(lambda x, f=function: f(model, x))(x)
        of_weights = [linear["weight"] for linear in gradients["linears"]]
        found.append([loss, gradient, *of_weights])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert got.dtype == want.dtype
            assert relative_error(got, want) <= max(GRADIENT_TOLERANCE, TOLERANCE[want.dtype])


def test_a_gate_apart_is_a_gate_in_one_chunk(linears: list[nn.Module]) -> None:
    x, down = mx.random.normal((2, 5, 12)), nn.Linear(8, 12)
    around = Around(x.dtype, gate="silu", residual=x)
    got = output(inputs(x, linears, dtype=x.dtype), down, around)
    want = output((beside(inputs(x, linears, dtype=x.dtype)),), down, around)
    assert relative_error(got, want) <= TOLERANCE[mx.float32]

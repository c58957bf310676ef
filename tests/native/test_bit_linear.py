"""The fused projections against their definition, for every instruction set and number of threads."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import (
    Projection,
    bit_linear,
    pack_ternary,
    rms_norm_quantize,
    ternary_matmul,
    use_backend,
)
from tests.tolerances import TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SIZES = [1, 31, 33, 63, 100, 5460]


def normal(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def projections(dims: int, outputs: tuple[int, ...], *, has_norms: bool = True) -> list[Projection]:
    return [
        Projection(
            pack_ternary(mx.random.randint(-1, 2, (count, dims))),
            mx.random.uniform(0.1, 1, (count if n else 1,)),
            1 + normal(dims) / 8 if has_norms else None,
        )
        for n, count in enumerate(outputs)
    ]


def run(backend: str, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    with use_backend(backend):
        y = bit_linear(x, *args, **kwargs)
        mx.eval(y)
    return y


def assert_near(x: mx.array, matrices: list[Projection], **options: Any) -> mx.array:
    """The result, which is the definition's up to codes that lie at a rounding boundary."""
    got = run("native", x, matrices, **options)
    want = run("reference", x, matrices, **options)
    assert got.dtype == x.dtype and got.shape == want.shape
    if options.get("quantize", True):
        # a code is one of 127 steps; hardly any differs
        difference = mx.abs(got.astype(mx.float32) - want.astype(mx.float32))
        limit = 0.02 * mx.abs(want.astype(mx.float32)).max().item()
        assert difference.max().item() <= limit
    else:
        assert relative_error(got, want) <= TOLERANCE[x.dtype]
    return got


@pytest.mark.sample(2)
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("quantize", [True, False], ids=["codes", "floats"])
def test_odd_sizes(instructions: str, dims: int, quantize: bool) -> None:
    mx.random.seed(dims)
    matrices = projections(dims, (37, 1, 20))
    for rows in (1, 2, 3, 14, 25):
        x = normal(rows, 2 * dims)
        assert_near(
            x,
            matrices,
            eps=1e-6,
            rounding="half_away",
            quantize=quantize,
            gate="silu",
            norm=1 + normal(dims) / 8,
            norm_eps=1e-5,
            residual=normal(rows, 58),
        )


@pytest.mark.parametrize("gate", ["silu", "relu2", "gelu", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_dtypes(gate: Any, dtype: mx.Dtype) -> None:
    mx.random.seed(5)
    matrices = projections(100, (33,), has_norms=False)
    norm, residual = (1 + normal(100) / 8).astype(dtype), normal(4, 33, dtype=dtype)
    x = normal(4, 200, dtype=dtype)
    for quantize in (True, False):
        options = {"norm": norm, "norm_eps": 1e-5, "residual": residual, "quantize": quantize}
        assert_near(x, matrices, gate=gate, **options)


def test_codes_are_those_of_rms_norm_quantize() -> None:
    mx.random.seed(6)
    for eps, rounding in ((None, "half_even"), (1e-6, "half_away")):
        matrices = projections(333, (41, 7), has_norms=eps is not None)
        for rows in (1, 9):
            x = 3 * normal(rows, 333)
            fused = run("native", x, matrices, eps=eps, rounding=rounding)
            with use_backend("native"):
                parts = []
                for weight, scale, norm in matrices:
                    codes, own = rms_norm_quantize(x, norm, eps=eps, rounding=rounding)
                    parts.append(ternary_matmul(codes, weight, codes=True) * (scale / own))
            assert mx.array_equal(fused, mx.concatenate(parts, axis=-1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantize", [True, False], ids=["codes", "floats"])
def test_rows_and_threads_give_the_same_bits(
    instructions: str, threads: int, quantize: bool
) -> None:
    mx.random.seed(7)
    matrices = projections(1100, (700, 900))
    x = normal(19, 1100)
    options: dict[str, Any] = {"eps": 1e-6, "rounding": "half_away", "quantize": quantize}
    whole = run("native", x, matrices, **options)
    native.kernels().set_threads(1)
    for count in (1, 2, 3, 7):
        assert mx.array_equal(run("native", x[:count], matrices, **options), whole[:count])
    single = mx.concatenate([run("native", x[n : n + 1], matrices, **options) for n in range(19)])
    assert mx.array_equal(single, whole)


@given(
    rows=st.integers(0, 9),
    dims=st.integers(1, 300),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "columns", "every other", "reversed", "broadcast"]),
    quantize=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shape_dtype_and_layout(
    rows: int, dims: int, outputs: list[int], dtype: mx.Dtype, layout: str, quantize: bool
) -> None:
    mx.random.seed(dims)
    x = {
        "plain": lambda: normal(rows, dims),
        "columns": lambda: normal(dims, rows).T,
        "every other": lambda: normal(rows, 2 * dims)[:, ::2],
        "reversed": lambda: normal(rows, dims)[::-1, ::-1],
        "broadcast": lambda: mx.broadcast_to(normal(1, dims), (rows, dims)),
    }[layout]().astype(dtype)
    residual = normal(sum(outputs), rows).T.astype(dtype)
    matrices = projections(dims, tuple(outputs))
    options: dict[str, Any] = {"eps": 1e-5, "quantize": quantize, "residual": residual}
    got = run("native", x, matrices, **options)
    copied = mx.array(np.array(x.astype(mx.float32))).astype(dtype)
    assert mx.array_equal(got, run("native", copied, matrices, **options))
    assert got.shape == (rows, sum(outputs)) and got.dtype == dtype


@pytest.mark.parametrize("quantize", [True, False], ids=["codes", "floats"])
def test_a_bad_row_is_alone(instructions: str, quantize: bool) -> None:
    mx.random.seed(8)
    matrices = projections(130, (70,))
    x = normal(6, 130)
    for norm_eps in (None, 1e-5):
        options: dict[str, Any] = {"eps": 1e-6, "quantize": quantize, "norm_eps": norm_eps}
        options["norm"] = None if norm_eps is None else mx.ones(130)
        want = run("native", x, matrices, **options)
        for bad in (mx.nan, mx.inf, -mx.inf):
            spoilt = mx.array(x)
            spoilt[3, 129] = bad
            for first in (0, 3):
                got = run("native", spoilt[first:5], matrices, **options)
                assert mx.isnan(got[3 - first]).all()
                keep = [n for n in range(first, 5) if n != 3]
                index = mx.array([n - first for n in keep])
                assert mx.array_equal(got[index], want[mx.array(keep)])


def test_zeros_and_extremes() -> None:
    matrices = projections(5460, (9,), has_norms=False)
    assert not run("native", mx.zeros((2, 5460)), matrices).any()
    # the largest sums that there are
    ones = [Projection(pack_ternary(mx.ones((5, 5460))), mx.ones(1))]
    for value in (1e-30, 1e-5, 1.0, 1e30):
        x = mx.full((3, 5460), -value)
        want = run("reference", x, ones)
        assert relative_error(run("native", x, ones), want) <= 1e-6


@pytest.mark.usefixtures("unfused")
def test_shapes_transforms_and_errors() -> None:
    mx.random.seed(9)
    matrices = projections(64, (32, 16))
    x = normal(2, 3, 64)

    def call(x: mx.array) -> mx.array:
        return bit_linear(x, matrices, eps=1e-6)

    with use_backend("native"):
        whole = call(x)
        assert whole.shape == (2, 3, 48)
        assert mx.array_equal(mx.compile(call)(x), whole)
        assert relative_error(mx.vmap(call)(x), whole) <= 0.02
        weights = mx.grad(lambda x: call(x).sum())(x)
        assert weights.shape == x.shape
        with pytest.raises(ValueError, match="residual"):
            bit_linear(x, matrices, eps=1e-6, residual=mx.zeros((2, 3, 47)))

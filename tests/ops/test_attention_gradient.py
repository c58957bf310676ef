"""Attention and its gradient as Metal computes them in training, against the formula in float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.ops import attention, use_backend
from mlx_mmfree.ops.attention import Mask
from tests.ops.attention_formula import (
    Sizes,
    arguments,
    attended,
    check,
    computed,
    gradients_by_formula,
    in_float64,
    mask_of,
    seen_by,
)
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error


def test_the_gradient_of_the_formula_is_that_of_finite_differences() -> None:
    sizes = Sizes(3, 4, 2, 3, batch=2, heads=2)
    seen = seen_by("causal", sizes)
    *inputs, given = in_float64(arguments(sizes))
    inputs += [None, np.array([0.3, -0.4])]
    inputs[3] = seen

    def loss(arrays: list[Any]) -> float:
        return float((given * attended(*arrays)[0]).sum())

    step = 1e-6
    for which, gradient in zip((0, 1, 2, 4), gradients_by_formula(*inputs, given), strict=True):
        for index in np.ndindex(gradient.shape):
            moved = []
            for sign in (1, -1):
                arrays = [array.copy() for array in inputs]
                arrays[which][index] += sign * step
                moved.append(loss(arrays))
            assert np.isclose((moved[0] - moved[1]) / (2 * step), gradient[index], 1e-6, 1e-8)


# every head dim, mask and sharing of heads; lengths around the sizes of tiles and of threadgroups
CASES = [
    (Sizes(16, 16, 128, 128), "causal", False),
    # the last query of a threadgroup alone sees a key of the next tile
    (Sizes(65, 66, 64, 64, heads=2), "causal", True),
    (Sizes(45, 31, 40, 33, batch=2, heads=4, groups=2), None, False),
    (Sizes(31, 31, 80, 80, heads=3, groups=3), "causal", False),
    (Sizes(32, 65, 32, 32, batch=2, heads=2), "rows", True),
    (Sizes(70, 9, 96, 96), None, False),
    (Sizes(17, 40, 1, 100, heads=2), "keys", False),
    # arrays of fewer than 8 numbers lie in another address space
    (Sizes(40, 2, 3, 1), "keys", True),
    (Sizes(64, 64, 16, 8, batch=2), None, True),
]


@pytest.mark.metal
@pytest.mark.usefixtures("metal", "traced")
class TestOnMetal:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(("sizes", "mask", "has_sinks"), CASES, ids=str)
    def test_values_and_gradients(self, sizes: Sizes, mask: str | None, has_sinks: bool) -> None:
        sinks = mx.arange(sizes.heads) - 0.5 if has_sinks else None
        check(arguments(sizes), mask_of(mask, sizes), sizes, sinks)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
    @pytest.mark.parametrize("mask", ["causal", "rows"])
    def test_other_dtypes(self, dtype: mx.Dtype, mask: str) -> None:
        sizes = Sizes(35, 40, 64, 64, heads=2)
        check(arguments(sizes, dtype), mask_of(mask, sizes), sizes)

    @pytest.mark.exhaustive
    def test_hundreds_of_positions(self) -> None:
        sizes = Sizes(260, 260)
        check(arguments(sizes), "causal", sizes)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("mask", [None, "causal", "rows"])
    def test_extreme_scores(self, mask: str | None) -> None:
        """Scores of hundreds, which float32 holds exactly, so that weights are 0, 1/2 and 1."""
        sizes = Sizes(40, 70, 16, 16)
        q, k, *others = arguments(sizes)
        q, k = mx.round(8 * q), mx.round(8 * k)
        # with weights of 0 and 1 alone, the gradients of queries and keys would be zero
        k[:, :, 1::2] = k[:, :, ::2]
        check([q, k, *others], mask_of(mask, sizes), sizes)

    @pytest.mark.parametrize("factor", [1e3, 1e15])
    def test_no_score_gives_nan(self, factor: float) -> None:
        q, *others = arguments(Sizes(20, 40, 16, 16))
        y, gradients = computed([factor * q, *others], "causal", None)
        assert all(mx.isfinite(array).all().item() for array in (y, *gradients))

    @pytest.mark.parametrize("offset", [-300.0, 300.0])
    def test_scores_far_from_zero(self, offset: float) -> None:
        sizes = Sizes(20, 40, 16, 16)
        q, k, *others = arguments(sizes)
        arrays = [mx.round(4 * q) / 4, mx.round(4 * k) / 4, *others]
        # the root of the dims
        arrays[0][..., 0], arrays[1][..., 0] = offset, 4.0
        check(arrays, None, sizes)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("mask", ["causal", "rows"])
    def test_queries_that_see_nothing(self, mask: str) -> None:
        """They give NaN, and add nothing to the gradients."""
        sizes = Sizes(50, 40, 32, 32, heads=2)
        blind = np.zeros(50, bool)
        given: Mask = "causal"
        if mask == "rows":
            given = mask_of("rows", sizes)
            given[:, :, 5:20] = False
            blind[5:20] = True
        else:
            blind[:10] = True
        arrays = arguments(sizes)
        *exact, cotangent = in_float64(arrays)
        y, gradients = computed(arrays, given, None)
        seen = seen_by(given, sizes)
        assert mx.isnan(y[:, :, mx.array(np.flatnonzero(blind))]).all().item()
        sighted = mx.array(np.flatnonzero(~blind))
        want = mx.array(attended(*exact, seen, None)[0].astype(np.float32))
        assert relative_error(y[:, :, sighted], want[:, :, sighted]) <= TOLERANCE[mx.float32]
        wanted = gradients_by_formula(*exact, seen, None, cotangent)
        for got, exact_gradient in zip(gradients, wanted, strict=True):
            error = relative_error(got, mx.array(exact_gradient.astype(np.float32)))
            assert error <= GRADIENT_TOLERANCE

    def test_arrays_that_are_not_contiguous(self) -> None:
        """Arrays as they come from one projection of all heads."""
        sizes = Sizes(20, 20, 32, 32, batch=2, heads=4, groups=2)
        mx.random.seed(3)
        heads = mx.random.normal((2, 20, 8, 32)).swapaxes(1, 2)
        given = mx.random.normal((2, 20, 4, 32)).swapaxes(1, 2)
        arrays = [*mx.split(heads, [4, 6], axis=1), given]
        check(arrays, "causal", sizes)

    def test_keys_of_another_dtype(self) -> None:
        sizes = Sizes(16, 20, 32, 32)
        q, k, v, given = arguments(sizes)
        arrays = [q, k.astype(mx.float16), v.astype(mx.bfloat16)]
        exact = in_float64([*arrays, given])
        y, gradients = computed([*arrays, given], "causal", None)
        seen = seen_by("causal", sizes)
        want = attended(*exact[:3], seen, None)[0]
        assert relative_error(y, mx.array(want.astype(np.float32))) <= TOLERANCE[mx.float32]
        wanted = gradients_by_formula(*exact[:3], seen, None, exact[3])
        for x, got, exact_gradient in zip(arrays, gradients, wanted, strict=True):
            assert got.dtype == x.dtype
            error = relative_error(got, mx.array(exact_gradient.astype(np.float32)))
            assert error <= max(GRADIENT_TOLERANCE, TOLERANCE[x.dtype])

    def test_gradient_of_a_gradient(self) -> None:
        sizes = Sizes(16, 18, 8, 8)
        q, k, v, _ = arguments(sizes)

        def penalty(q: mx.array) -> mx.array:
            inner = mx.grad(lambda q: (attention(q, k, v, "causal") ** 2).sum())
            return (inner(q) ** 2).sum()

        with use_backend("metal"):
            got = mx.grad(penalty)(q)
        with use_backend("reference"):
            assert relative_error(got, mx.grad(penalty)(q)) <= GRADIENT_TOLERANCE

"""The gradient of attention by its kernel, against the definition and against float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mmfree import native
from mlx_mmfree.ops import attention, use_backend
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

if reason := native.unavailable():
    pytest.skip(reason, allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
ALL = (0, 1, 2)


def gradients(backend: str, arrays: list[mx.array], weight: mx.array, mask: Any) -> list[mx.array]:
    def loss(*arrays: mx.array) -> mx.array:
        return (attention(*arrays, mask) * weight).sum()

    with use_backend(backend):
        found = mx.grad(loss, argnums=ALL)(*arrays)
        mx.eval(found)
    return list(found)


def drawn(
    batch: int, heads: tuple[int, int], length: int, count: int, dims: tuple[int, int]
) -> tuple[list[mx.array], mx.array]:
    mx.random.seed(length + count)
    queries = mx.random.normal((batch, heads[0], length, dims[0]))
    keys = mx.random.normal((batch, heads[1], count, dims[0]))
    values = mx.random.normal((batch, heads[1], count, dims[1]))
    return [queries, keys, values], mx.random.normal((batch, heads[0], length, dims[1]))


def in_float64(arrays: list[mx.array], weight: mx.array, seen: Any) -> list[np.ndarray]:
    """The gradients from their formulas, for as many query heads as key heads."""
    q, k, v, w = (np.array(x, np.float64) for x in (*arrays, weight))
    scale = q.shape[-1] ** -0.5
    scores = np.where(seen, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = w @ v.swapaxes(-1, -2)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * scale
    return [of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ w]


@given(
    length=st.sampled_from([1, 2, 13, 64, 65, 130]),
    more=st.sampled_from([0, 1, 5, 128]),
    heads=st.sampled_from([(1, 1), (6, 1), (6, 6), (4, 2)]),
    dims=st.sampled_from([(1, 1), (8, 8), (64, 64), (100, 20), (33, 128)]),
    mask=st.sampled_from([None, "causal", "rows", "shared"]),
    dtype=st.sampled_from(DTYPES),
    is_turned=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_equals_definition(
    length: int,
    more: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    mask: Any,
    dtype: mx.Dtype,
    is_turned: bool,
) -> None:
    count = length + more
    arrays, weight = drawn(2, heads, length, count, dims)
    if mask in ("rows", "shared"):
        shape = (2, 1, length, count) if mask == "rows" else (1, count)
        mask = mx.random.uniform(shape=shape) < 0.8
        mask[..., 0] = True
    arrays = [array.astype(dtype) for array in arrays]
    if is_turned:
        arrays = [mx.contiguous(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays]
    got = gradients("native", arrays, weight, mask)
    want = gradients("reference", [array.astype(mx.float32) for array in arrays], weight, mask)
    for own, other in zip(got, want, strict=True):
        assert own.dtype == dtype
        # where all but rounding cancels, there is nothing to compare
        if mx.abs(other).max() > 1e-3:
            assert relative_error(own, other) <= max(GRADIENT_TOLERANCE, TOLERANCE[dtype])


@pytest.mark.parametrize("is_causal", [False, True])
def test_equals_float64(is_causal: bool) -> None:
    arrays, weight = drawn(2, (3, 3), 150, 190, (24, 40))
    seen = np.arange(190) <= np.arange(40, 190)[:, None] if is_causal else True
    got = gradients("native", arrays, weight, "causal" if is_causal else None)
    for own, want in zip(got, in_float64(arrays, weight, seen), strict=True):
        assert np.abs(np.array(own) - want).max() <= 2e-6 * np.abs(want).max()


def test_equals_finite_differences() -> None:
    arrays, weight = drawn(1, (2, 1), 7, 9, (6, 5))
    got = gradients("native", arrays, weight, "causal")
    exact = [np.array(array, np.float64) for array in (*arrays, weight)]
    seen = np.arange(9) <= np.arange(2, 9)[:, None]

    def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
        scores = np.where(seen, q @ k.swapaxes(-1, -2) / 6**0.5, -np.inf)
        weights = np.exp(scores)
        return float((weights / weights.sum(-1, keepdims=True) @ v * exact[3]).sum())

    for number, own in enumerate(got):
        for index in np.ndindex(own.shape):
            moved = [[a.copy() for a in exact[:3]] for _ in range(2)]
            for arguments, step in zip(moved, (1e-5, -1e-5), strict=True):
                arguments[number][index] += step
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
            assert abs(np.array(own)[index] - slope) <= 1e-5 * max(1, abs(slope))


def test_8192_positions() -> None:
    arrays, weight = drawn(1, (1, 1), 8192, 8192, (2, 2))
    got = gradients("native", arrays, weight, "causal")
    # the last queries see everything, and the last keys are seen by few
    last = slice(8192 - 64, None)
    q, k, v = arrays
    seen = np.arange(8192) <= np.arange(8192 - 64, 8192)[:, None]
    want = in_float64([q[:, :, last], k, v], weight[:, :, last], seen)
    assert np.abs(np.array(got[0][:, :, last]) - want[0]).max() <= 1e-5 * np.abs(want[0]).max()
    for own, other in zip(got[1:], want[1:], strict=True):
        found, expected = np.array(own[:, :, last]), other[:, :, last]
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_threads_do_not_change_bits() -> None:
    arrays, weight = drawn(1, (4, 2), 300, 300, (40, 40))
    kernels = native.kernels()
    count, found = kernels.threads(), []
    try:
        for number in (1, 2, 3):
            kernels.set_threads(number)
            found.append(gradients("native", arrays, weight, "causal"))
    finally:
        kernels.set_threads(count)
    for other in found[1:]:
        assert all(mx.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_query_that_sees_nothing_adds_nothing() -> None:
    (queries, keys, values), weight = drawn(1, (2, 2), 4, 9, (8, 8))
    mask = mx.array([[True], [False], [True], [True]])
    mask = mx.broadcast_to(mask, (4, 9))
    got = gradients("native", [queries, keys, values], weight, mask)
    seen = mx.array([0, 2, 3])
    want = gradients("native", [queries[:, :, seen], keys, values], weight[:, :, seen], None)
    assert mx.array_equal(got[0][:, :, 1], mx.zeros((1, 2, 8)))
    assert relative_error(got[0][:, :, seen], want[0]) <= TOLERANCE[mx.float32]
    for own, other in zip(got[1:], want[1:], strict=True):
        assert relative_error(own, other) <= TOLERANCE[mx.float32]


@pytest.mark.usefixtures("unfused")
def test_transforms_and_second_order() -> None:
    arrays, _ = drawn(3, (4, 2), 9, 9, (8, 8))
    stacked = [mx.stack([array, 2 * array]) for array in arrays]

    def loss(*arrays: mx.array) -> mx.array:
        return attention(*arrays, "causal").square().sum()

    def curvature(*arrays: mx.array) -> mx.array:
        return sum(g.square().sum() for g in mx.grad(loss, argnums=ALL)(*arrays))

    results = []
    for backend in ("native", "reference"):
        with use_backend(backend):
            first = mx.grad(loss, argnums=ALL)
            results.append(
                [
                    *mx.compile(first)(*arrays),
                    *mx.vmap(first)(*stacked),
                    *mx.grad(curvature, argnums=ALL)(*arrays),
                ]
            )
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) <= GRADIENT_TOLERANCE


def test_one_gradient_at_a_time() -> None:
    arrays, weight = drawn(1, (2, 1), 5, 6, (8, 4))
    whole = gradients("native", arrays, weight, None)
    with use_backend("native"):
        for number in ALL:
            alone = mx.grad(lambda *a: (attention(*a) * weight).sum(), argnums=number)(*arrays)
            assert mx.array_equal(alone, whole[number])

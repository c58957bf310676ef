"""Attention against MLX's own, and what is refused."""

from typing import Literal

import mlx.core as mx
import pytest

from mlx_mmfree.ops import attention
from mlx_mmfree.ops.backend.dispatch import operations
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.sample(2)
@pytest.mark.parametrize("mask", [None, "causal", "rows", "keys"])
@pytest.mark.parametrize("length", [1, 7, 600])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_equals_the_one_of_mlx(
    mask: Literal["causal", "rows", "keys"] | None, length: int, key_heads: int
) -> None:
    q = mx.random.normal((2, 6, length, 16))
    k, v = mx.random.normal((2, 2, key_heads, length + 9, 16))
    shapes = {"rows": (2, 1, length, length + 9), "keys": (2, 1, 1, length + 9)}
    given = mx.random.uniform(shape=shapes[mask]) < 0.8 if mask in shapes else mask
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=given)
    assert relative_error(attention(q, k, v, given), want) <= TOLERANCE[mx.float32]


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["chunked", "metal", "reference"])
@pytest.mark.parametrize("mask", [None, "causal", "rows"])
@pytest.mark.parametrize("length", [1, 300])
@pytest.mark.parametrize("shared", [(1, 6), (2, 1), (1, 1)], ids=str)
def test_bias_and_sinks_equal_those_of_mlx(
    backend: str,
    mask: Literal["causal", "rows"] | None,
    length: int,
    shared: tuple[int, int],
) -> None:
    count = length + 9
    q = mx.random.normal((2, 6, length, 16))
    k, v = mx.random.normal((2, 2, 3, count, 16))
    bias, sinks = mx.random.normal((*shared, length, count)), mx.random.normal((6,))
    seen = {
        None: mx.ones((1, 1, length, count), mx.bool_),
        "causal": mx.arange(count) <= mx.arange(9, count)[:, None],
        "rows": mx.random.uniform(shape=(2, 1, length, count)) < 0.8,
    }[mask]
    given = seen if mask == "rows" else mask
    for bias_of, sinks_of in ((bias, None), (None, sinks), (bias, sinks)):
        added = mx.where(seen, 0.0 if bias_of is None else bias_of, -mx.inf)
        want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=added, sinks=sinks_of)
        got = operations()["attention"].backends[backend].run(q, k, v, given, bias_of, sinks_of)
        assert relative_error(got, want) <= TOLERANCE[mx.float32]


def test_a_query_that_sees_a_sink_alone_gives_zero() -> None:
    x, sees_nothing = mx.ones((1, 2, 3, 8)), mx.zeros((1, 1, 3, 3), mx.bool_)
    assert not attention(x, x, x, sees_nothing, sinks=mx.zeros((2,))).any().item()


@pytest.mark.parametrize("shape", [(4, 5), (1, 2, 3, 5), (2, 1, 3, 5), (1, 1, 1, 3, 5)])
def test_a_mask_that_does_not_fit_the_scores(shape: tuple[int, ...]) -> None:
    q, k = mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 5, 8))
    with pytest.raises(ValueError, match=r"'mask' must broadcast to .*\(1, 1, 3, 5\)"):
        attention(q, k, k, mx.ones(shape, mx.bool_))


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 3, 5), (1, 2, 3, 4)])
def test_a_bias_that_does_not_fit_the_scores(shape: tuple[int, ...]) -> None:
    q, k = mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 5, 8))
    with pytest.raises(ValueError, match=r"'bias' must broadcast to .*\(1, 2, 3, 5\)"):
        attention(q, k, k, bias=mx.zeros(shape))


def test_sinks_of_another_number_of_heads() -> None:
    x = mx.ones((1, 2, 3, 8))
    with pytest.raises(ValueError, match=r"'sinks' must have shape \(2,\)"):
        attention(x, x, x, sinks=mx.zeros((1,)))


def test_values_may_have_other_dims() -> None:
    q, k, v = mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 4))
    assert mx.allclose(attention(q, k, v), mx.ones((1, 2, 3, 4)))


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"'keys' must have a number of heads that divides 4"):
        attention(mx.ones((1, 4, 1, 8)), mx.ones((1, 3, 1, 8)), mx.ones((1, 3, 1, 8)))

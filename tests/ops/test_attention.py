"""Attention against MLX's own, and what is refused."""

from typing import Literal

import mlx.core as mx
import pytest

from mlx_mmfree.ops import attention
from tests.tolerances import TOLERANCE, relative_error


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


def test_values_may_have_other_dims() -> None:
    q, k, v = mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 5, 8)), mx.ones((1, 2, 5, 4))
    assert mx.allclose(attention(q, k, v), mx.ones((1, 2, 3, 4)))


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"'keys' must have a number of heads that divides 4"):
        attention(mx.ones((1, 4, 1, 8)), mx.ones((1, 3, 1, 8)), mx.ones((1, 3, 1, 8)))

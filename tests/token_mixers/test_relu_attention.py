"""Attention by ReLU at a length of several blocks of queries, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.layers.attention.positions import ALiBi
from mlx_mmfree.token_mixers import ReLUAttention
from mlx_mmfree.token_mixers.relu_attention import QUERY_BLOCK
from tests.tolerances import TOLERANCE, relative_error


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_many_queries_with_padding(is_causal: bool, power: int) -> None:
    mx.random.seed(0)
    length, heads, dims = QUERY_BLOCK + 70, 2, 16
    mixer = ReLUAttention(
        dims, num_heads=heads, power=power, is_causal=is_causal, position_bias=ALiBi(heads)
    )
    x = mx.random.normal((1, length, dims))
    valid = mx.arange(length) < length - 5
    y, _ = mixer(x, None, valid[None])
    real = length - 5
    q, k, v = (
        np.array(mixer[f"{name}_proj"](x[0, :real]), np.float64).reshape(real, heads, -1)
        for name in ("query", "key", "value")
    )
    distance = np.abs(np.arange(real)[:, None] - np.arange(real))
    slopes = np.array([2.0**-4, 2.0**-8])
    scores = np.einsum("thd,jhd->htj", q, k) / np.sqrt(dims // heads)
    weights = np.maximum(scores - slopes[:, None, None] * distance, 0) ** power
    seen = np.tri(real) if is_causal else np.ones((real, real))
    weights *= seen / seen.sum(axis=1, keepdims=True)
    want = np.einsum("htj,jhd->thd", weights, v).reshape(real, dims)
    want = want @ np.array(mixer.output_proj.weight).T
    assert relative_error(y[0, :real], mx.array(want)) <= TOLERANCE[mx.float32]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="'normalization' must be one of 'length'"):
        ReLUAttention(16, normalization="softmax")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'power' must be 1 or 2"):
        ReLUAttention(16, power=3)

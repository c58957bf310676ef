"""The gradient of an embedding adds up many rows."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mmfree.layers.embedding import embed_tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_gradient_of_a_common_token(dtype: mx.Dtype) -> None:
    embed = nn.Embedding(4, 2)
    embed.set_dtype(dtype)
    tokens = mx.zeros((2, 1024), mx.int32)
    tokens[0, 0] = 3

    def total(weight: mx.array) -> mx.array:
        embed.weight = weight
        return embed_tokens(embed, tokens).astype(mx.float32).sum()

    weight = embed.weight
    gradient = mx.grad(total)(weight)
    assert gradient.dtype == dtype
    # 2047 lies between 2040 and 2048 in bfloat16
    assert gradient[:, 0].tolist() == [2048 if dtype == mx.bfloat16 else 2047, 0, 0, 1]
    assert mx.array_equal(embed_tokens(embed, tokens), weight[tokens])

"""Rows of an embedding, whose gradient adds up float32 whatever the dtype of the weights."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.backend.gradient import with_reference_gradient

# A common token adds up thousands of rows; in bfloat16 a sum stops growing at 256 times what is added.
_rows = with_reference_gradient(
    lambda weight, tokens: weight[tokens],
    lambda weight, tokens: weight.astype(mx.float32)[tokens].astype(weight.dtype),
)


def embed_tokens(embed: nn.Module, tokens: mx.array) -> mx.array:
    """Applies an embedding.

    Args:
        embed: `nn.Embedding`, or what takes its place.
        tokens: Integers `(...)`.

    Returns:
        `(..., D)`.
    """
    is_short = type(embed) is nn.Embedding and embed.weight.dtype != mx.float32
    rows: Any = _rows(embed.weight, tokens) if is_short else embed(tokens)
    result: mx.array = rows
    return result

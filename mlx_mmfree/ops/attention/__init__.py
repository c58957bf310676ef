"""Scaled dot-product attention with shared key and value heads."""

from typing import Literal

import mlx.core as mx

from ..dispatch import dispatch

Mask = mx.array | Literal["causal"] | None


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: Mask = None) -> mx.array:
    r"""Softmax attention; query head `h` reads key and value head :math:`\lfloor h G / H \rfloor`.

    .. math::
        y_{t,h} = \sum_j \mathrm{softmax}_j\big(q_{t,h}^\top k_{j,g(h)} / \sqrt{K}\big)\,v_{j,g(h)}

    Args:
        queries: `(B, H, L, K)`, any float dtype.
        keys: `(B, G, N, K)`, `G` a divisor of `H`.
        values: `(B, G, N, V)`.
        mask: What each query sees: booleans that broadcast to `(B, 1, L, N)`, `"causal"` for
            `j <= t + N - L`, or `None` for everything. A query that sees nothing gives NaN.

    Returns:
        `(B, H, L, V)` in the dtype of the queries.

    Raises:
        ValueError: The number of key heads does not divide that of query heads.
    """
    if queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"[attention] 'keys' must have a number of heads that divides {queries.shape[1]} but got "
            f"{keys.shape[1]}."
        )
    y: mx.array = dispatch(__name__, queries, keys, values, mask)
    return y

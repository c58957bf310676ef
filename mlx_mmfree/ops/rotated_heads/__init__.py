"""Heads of projected tokens, with queries and keys in rotary position embedding."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def rotated_heads(
    projected: mx.array,
    offset: int | mx.array,
    wavelengths: mx.array,
    *,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    r"""Splits projected tokens into heads, and rotates pairs of each query and key.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta), \quad
        \theta = p / \lambda_i

    Source: rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
        projected: Heads of queries, keys and values, one behind the other, `(B, L, (H + 2G) K)`, any
            float dtype, `K` even.
        offset: The position of the first token, a number or `(B,)`, or of each token, `(B, L)`.
        wavelengths: Positions per radian of each pair, float32 `(K / 2,)`. They get no gradient.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)` instead of halves `(i, i + K / 2)`.

    Returns:
        Queries `(B, H, L, K)`, keys and values `(B, G, L, K)` in the dtype of `projected`.

    Raises:
        ValueError: The shapes do not agree.
    """
    count = num_heads + 2 * num_kv_heads
    if projected.ndim != 3 or projected.shape[2] != 2 * count * wavelengths.size:
        raise ValueError(
            "[rotated_heads] 'projected' must be (B, L, (H + 2G) K) but has shape "
            f"{projected.shape} for {num_heads} and {num_kv_heads} heads and "
            f"{wavelengths.size} wavelengths."
        )
    heads: tuple[mx.array, mx.array, mx.array] = dispatch(
        __name__, projected, offset, wavelengths, num_heads, num_kv_heads, is_interleaved
    )
    return heads

"""Heads of projected tokens, with queries and keys in rotary position embedding (arXiv 2104.09864)."""

from typing import NamedTuple

import mlx.core as mx

from ..backend.dispatch import dispatch


class Rotation(NamedTuple):
    r"""Angles :math:`\theta = p / \lambda_i` of rotary position embedding, which layers share.

    Attributes:
        offset: The position :math:`p` of the first token, a number or `(B,)`, or of each, `(B, L)`.
        wavelengths: Positions per radian of each pair :math:`\lambda_i`, float32 `(K / 2,)`.
        cosines: Of the angles, float32 `(1 or B, L, K / 2)`.
        sines: Likewise.

    Example:
        >>> rotation = Rotation.of(5, 3, mx.array([1.0, 100.0]))
        >>> rotation.cosines.shape
        (1, 3, 2)
    """

    offset: int | mx.array
    wavelengths: mx.array
    cosines: mx.array
    sines: mx.array

    @classmethod
    def of(cls, offset: int | mx.array, length: int, wavelengths: mx.array) -> "Rotation":
        """The angles of `length` tokens. They get no gradient."""
        places = mx.array(offset)
        if places.ndim < 2:
            places = places.reshape(-1, 1) + mx.arange(length)
        # as MLX has it, so that the last bits of large angles agree
        angles = places.astype(mx.float32)[..., None] * mx.reciprocal(wavelengths)
        angles = mx.stop_gradient(angles)
        return cls(offset, wavelengths, mx.cos(angles), mx.sin(angles))


def rotated_heads(
    projected: mx.array,
    rotation: Rotation,
    *,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    r"""Splits projected tokens into heads, and rotates pairs of each query and key.

    .. math::
        (a, b) \mapsto (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta)

    Source: rotary position embedding (Su et al., arXiv 2104.09864).

    Args:
        projected: Heads of queries, keys and values, one behind the other, `(B, L, (H + 2G) K)`, any
            float dtype, `K` even.
        rotation: The angles :math:`\theta` of these tokens.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `G`.
        is_interleaved: Pairs are neighbours `(2i, 2i + 1)` instead of halves `(i, i + K / 2)`.

    Returns:
        Queries `(B, H, L, K)`, keys and values `(B, G, L, K)` in the dtype of `projected`.

    Raises:
        ValueError: The shapes do not agree, or there are no heads.

    Example:
        >>> rotation = Rotation.of(0, 3, mx.array([1.0, 100.0]))
        >>> heads = rotated_heads(mx.ones((1, 3, 16)), rotation, num_heads=2, num_kv_heads=1)
        >>> [part.shape for part in heads]
        [(1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4)]
    """
    count, dims = num_heads + 2 * num_kv_heads, 2 * rotation.wavelengths.size
    for name, heads in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if heads < 1:
            raise ValueError(f"[rotated_heads] '{name}' must be positive but got {heads}.")
    if projected.ndim != 3 or projected.shape[2] != count * dims or not dims:
        raise ValueError(
            "[rotated_heads] 'projected' must be (B, L, (H + 2G) K) with K > 0 but has shape "
            f"{projected.shape} for {num_heads} and {num_kv_heads} heads of {dims} dims."
        )
    batch, length = projected.shape[:2]
    if projected.size == 0:
        queries = mx.zeros((batch, num_heads, length, dims), projected.dtype)
        keys = mx.zeros((batch, num_kv_heads, length, dims), projected.dtype)
        return queries, keys, keys
    turned: tuple[mx.array, mx.array, mx.array] = dispatch(
        __name__, projected, rotation, num_heads, num_kv_heads, is_interleaved
    )
    return turned

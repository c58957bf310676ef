"""Random features of the softmax kernel (Choromanski et al., arXiv 2009.14794)."""

import mlx.core as mx
import numpy as np

NO_MAXIMUM = -1e30
"""What stands for the largest exponent where there is none yet."""


def orthogonal_projection(features: int, dims: int, key: mx.array | None = None) -> mx.array:
    """Gaussian directions, of which each `dims` ones are orthogonal, float32 `(features, dims)`.

    Args:
        features: Number of directions.
        dims: Their size.
        key: Source of randomness; `None`: MLX's global one.
    """
    blocks = -(-features // dims)
    drawn = np.array(mx.random.normal((blocks + 1, dims, max(dims, features)), key=key), np.float64)
    directions, triangle = np.linalg.qr(drawn[:blocks, :, :dims])
    # with these signs each direction is as likely as any other
    directions = directions * np.sign(np.diagonal(triangle, axis1=-2, axis2=-1))[:, None]
    rows = directions.swapaxes(-1, -2).reshape(-1, dims)[:features]
    lengths = np.linalg.norm(drawn[blocks, :, :features], axis=0)
    return mx.array((rows * lengths[:, None]).astype(np.float32))


def exponents(x: mx.array, projection: mx.array) -> tuple[mx.array, mx.array]:
    r"""The two exponents of a feature, :math:`W \tilde x` and :math:`\lVert\tilde x\rVert^2 / 2`.

    Args:
        x: `(..., K)`, of which :math:`\tilde x = x / K^{1/4}`.
        projection: `W`, `(F, K)`.

    Returns:
        float32 `(..., F)` and `(..., 1)`.
    """
    x = x.astype(mx.float32) * x.shape[-1] ** -0.25
    return x @ projection.astype(mx.float32).T, x.square().sum(axis=-1, keepdims=True) / 2


def softmax_features(
    projected: mx.array, half: mx.array, maximum: mx.array, eps: float
) -> mx.array:
    r"""Features whose products stand for :math:`\exp(q \cdot k / \sqrt K)`, `(..., F)`.

    .. math::
        \phi = F^{-1/2}\big(\exp(W \tilde x - \lVert\tilde x\rVert^2 / 2 - c) + \epsilon\big)

    Args:
        projected: The first of `exponents`.
        half: The second.
        maximum: `c`, at least the largest of the first. It cancels but for :math:`\epsilon`.
        eps: :math:`\epsilon`.
    """
    return (mx.exp(projected - half - maximum) + eps) * projected.shape[-1] ** -0.5


def running_maximum(x: mx.array, before: mx.array, starts: mx.array | None) -> mx.array:
    """The largest number of each position and those before it in its sample.

    Args:
        x: `(B, H, L)`.
        before: That of all positions that were read before, `(B, H)`.
        starts: Booleans `(B, L)`, `True` where another sample begins.

    Returns:
        `(B, H, L)`.
    """
    x = mx.concatenate([before[..., None], x], axis=-1)
    if starts is None:
        return mx.cummax(x, axis=-1)[..., 1:]
    # whether a position has met the beginning of its sample
    is_full = mx.pad(starts, [(0, 0), (1, 0)], constant_values=True)[:, None]
    reach, length = 1, x.shape[-1]
    while reach < length:
        further = mx.pad(x[..., :-reach], [(0, 0), (0, 0), (reach, 0)], constant_values=NO_MAXIMUM)
        x = mx.where(is_full, x, mx.maximum(x, further))
        earlier = mx.pad(is_full[..., :-reach], [(0, 0), (0, 0), (reach, 0)], constant_values=True)
        is_full = mx.logical_or(is_full, earlier)
        reach *= 2
    return x[..., 1:]

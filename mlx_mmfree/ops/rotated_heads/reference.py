"""Definition of `rotated_heads` in plain float32 operations."""

import mlx.core as mx

from . import Rotation


def run(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    cosines, sines = rotation.cosines, rotation.sines
    queries, keys, values = split(projected, num_heads, num_kv_heads)
    turned = [rotate(x, cosines, sines, is_interleaved) for x in (queries, keys)]
    return turned[0], turned[1], values


def split(
    projected: mx.array, num_heads: int, num_kv_heads: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values of projected tokens."""
    count = num_heads + num_kv_heads
    tokens = mx.unflatten(projected, -1, (count + num_kv_heads, -1))
    queries, keys, values = mx.split(tokens.swapaxes(1, 2), [num_heads, count], axis=1)
    return queries, keys, values


def rotate(x: mx.array, cosines: mx.array, sines: mx.array, is_interleaved: bool) -> mx.array:
    """Heads `(B, heads, L, K)`, rotated."""
    parts = x.astype(mx.float32).reshape(*x.shape[:-1], *((-1, 2) if is_interleaved else (2, -1)))
    axis = -1 if is_interleaved else -2
    a, b = (part.squeeze(axis) for part in mx.split(parts, 2, axis=axis))
    cosines, sines = cosines[:, None], sines[:, None]
    turned = mx.stack([a * cosines - b * sines, a * sines + b * cosines], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)

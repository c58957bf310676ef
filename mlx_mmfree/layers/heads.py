"""Heads, side by side in the last axis or on an axis of their own."""

import mlx.core as mx

from .arguments import check_optional_sizes, check_sizes


def split_heads(x: mx.array, num_heads: int) -> mx.array:
    """`(B, L, H * K)` as `(B, H, L, K)`."""
    return mx.unflatten(x, -1, (num_heads, -1)).swapaxes(1, 2)


def merge_heads(x: mx.array) -> mx.array:
    """`(B, H, L, K)` as `(B, L, H * K)`."""
    return mx.flatten(x.swapaxes(1, 2), 2)


def one_hot_values(batch_size: int, num_heads: int, length: int) -> mx.array:
    """The values for which a sum of weighted values is the weights, float32 `(B, H, N, N)`."""
    return mx.broadcast_to(mx.eye(length), (batch_size, num_heads, length, length))


def dims_of_a_head(place: str, dims: int, num_heads: int, head_dim: int | None = None) -> int:
    """`head_dim`, or by default what each of `num_heads` gets of `dims`.

    Args:
        place: What reports wrong numbers.
        dims: Numbers of all heads.
        num_heads: Heads.
        head_dim: Numbers of one head.

    Raises:
        TypeError: One is not an integer.
        ValueError: One is not positive, or the heads do not divide the dims.
    """
    check_sizes(place, dims=dims, num_heads=num_heads)
    check_optional_sizes(place, head_dim=head_dim)
    if head_dim is not None:
        return head_dim
    if dims % num_heads:
        raise ValueError(
            f"[{place}] 'num_heads' must divide 'dims' but got {num_heads} heads for {dims} dims."
        )
    return dims // num_heads

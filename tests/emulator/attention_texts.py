"""The texts of the kernels that attend for a decoded token."""

import mlx.core as mx

from mlx_mmfree.ops.attention.metal_step import one_token
from mlx_mmfree.ops.backend import launch


def text_of_attention(
    dims: int,
    *,
    dtype: mx.Dtype = mx.float16,
    is_gated: bool = False,
    is_windowed: bool = False,
    parts: int = 1,
) -> tuple[str, str]:
    """The name and text of the kernel that reads the cache for a token of 8 heads of so many dims."""
    cache, seen = mx.zeros((1, 2, 256, dims), dtype), mx.zeros((1, 256), mx.bool_)
    angles, norm, one = (
        mx.zeros((1, 1, dims // 2)),
        mx.ones((dims,), dtype),
        mx.zeros((1,), mx.int32),
    )
    with launch.recording() as texts:
        one_token(
            mx.zeros((1, 1, (8 * (1 + is_gated) + 4) * dims), dtype),
            (cache, cache),
            (cache, cache),
            (one, seen if is_windowed else one, one),
            (angles, angles),
            (norm, norm),
            num_heads=8,
            eps=1e-6,
            is_interleaved=False,
            is_gated=is_gated,
            is_windowed=is_windowed,
            parts=parts,
        )
    return next(iter(texts.items()))

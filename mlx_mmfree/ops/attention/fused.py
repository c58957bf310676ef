"""`attention` by MLX's fused kernels, in the dtype of the arguments.

While gradients are traced, MLX 0.32 computes plain operations on Metal, which it calls faster for
training. They keep the weights of all keys for each query. On CUDA it has a fused gradient.
"""

import mlx.core as mx

from . import Mask


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    dtype, (length, dims), count = queries.dtype, queries.shape[2:], keys.shape[2]
    if bias is not None:
        if isinstance(mask, str):
            mask = mx.arange(count) <= mx.arange(count - length, count)[:, None]
        bias = bias.astype(dtype)
        mask = bias if mask is None else mx.where(mask, bias, mx.array(-mx.inf, dtype))
    return mx.fast.scaled_dot_product_attention(
        queries,
        keys.astype(dtype),
        values.astype(dtype),
        scale=dims**-0.5,
        mask=mask,
        sinks=None if sinks is None else sinks.astype(dtype),
    )

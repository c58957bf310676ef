"""`rotated_heads` by MLX's own kernels. Queries and keys are rotated at once."""

from functools import partial

import mlx.core as mx

from . import Rotation


def run(
    projected: mx.array,
    rotation: Rotation,
    num_heads: int,
    num_kv_heads: int,
    is_interleaved: bool,
) -> tuple[mx.array, mx.array, mx.array]:
    (batch, length), count = projected.shape[:2], num_heads + num_kv_heads
    offset = rotation.offset
    tokens = mx.unflatten(projected, -1, (count + num_kv_heads, -1))
    both, values = mx.split(tokens.swapaxes(1, 2), [count], axis=1)
    rotate = partial(
        mx.fast.rope,
        dims=tokens.shape[3],
        traditional=is_interleaved,
        base=None,
        scale=1.0,
        freqs=rotation.wavelengths,
    )
    if isinstance(offset, mx.array) and offset.ndim == 2:
        # rows of one token
        rows = both.swapaxes(1, 2).reshape(batch * length, count, 1, -1)
        turned = rotate(rows, offset=mx.broadcast_to(offset, (batch, length)).reshape(-1))
        both = turned.reshape(batch, length, count, -1).swapaxes(1, 2)
    else:
        both = rotate(both, offset=offset)
    queries, keys = mx.split(both, [num_heads], axis=1)
    return queries, keys, values

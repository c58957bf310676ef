"""Definition of `attention_step`, in terms of `attention`."""

import mlx.core as mx

from ..attention import attention
from ..slots import next_place, write_slots
from . import Options


def run(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    batch, groups, room, dims = keys.shape
    num_heads = options.num_heads
    if options.place is None:
        place = next_place(positions, room, options.window, options.sinks)
    else:
        place = options.place()
    heads = projected.reshape(batch, -1, 1, dims)
    if options.query_norm is not None:
        q, k, v = mx.split(heads, [num_heads, num_heads + groups], axis=1)
        q = mx.fast.rms_norm(q, options.query_norm, options.norm_eps)
        k = mx.fast.rms_norm(k, options.key_norm, options.norm_eps)
        heads = mx.concatenate([q, k, v], axis=1)
    turned = heads[:, : num_heads + groups]
    if options.wavelengths is not None:
        # queries and keys in one operation
        turned = mx.fast.rope(
            turned,
            dims,
            traditional=options.is_interleaved,
            base=None,
            scale=1.0,
            offset=place.lengths,
            freqs=options.wavelengths,
        )
    q, k = mx.split(turned, [num_heads], axis=1)
    v = heads[:, num_heads + groups :]
    keys = write_slots(keys, k.astype(keys.dtype), place.slots)
    values = write_slots(values, v.astype(values.dtype), place.slots)
    count = place.positions.shape[1]
    y = attention(q, keys[:, :, :count], values[:, :, :count], place.mask)
    return y.reshape(batch, 1, -1).astype(projected.dtype), keys, values, place.positions

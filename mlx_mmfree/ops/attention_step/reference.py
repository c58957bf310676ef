"""Definition of `attention_step`, in terms of `attention`."""

import mlx.core as mx

from ..attention import attention
from ..slots import held_positions, next_slots, slots_after, write_slots
from . import Options


def run(
    projected: mx.array,
    keys: mx.array,
    values: mx.array,
    positions: mx.array,
    options: Options,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    num_heads, wavelengths, is_interleaved, query_norm, key_norm, norm_eps, window, sinks = options
    batch, groups, room, dims = keys.shape
    lengths = mx.zeros((batch,), mx.int32)
    if positions.shape[1]:
        lengths = mx.max(positions, axis=1) + 1
    heads = projected.reshape(batch, -1, 1, dims)
    q, k, v = mx.split(heads, [num_heads, num_heads + groups], axis=1)
    if query_norm is not None:
        q = mx.fast.rms_norm(q, query_norm, norm_eps)
        k = mx.fast.rms_norm(k, key_norm, norm_eps)
    if wavelengths is not None:
        q, k = (
            mx.fast.rope(
                x,
                dims,
                traditional=is_interleaved,
                base=None,
                scale=1.0,
                offset=lengths,
                freqs=wavelengths,
            )
            for x in (q, k)
        )
    slot = next_slots(lengths, window, sinks)
    keys = write_slots(keys, k.astype(keys.dtype), slot)
    values = write_slots(values, v.astype(values.dtype), slot)
    slots = min(slots_after(positions.shape[1], 1, window, sinks), room)
    positions = held_positions(lengths + 1, slots, window, sinks)
    mask = (positions >= 0)[:, None, None]
    y = attention(q, keys[:, :, :slots], values[:, :, :slots], mask)
    return y.reshape(batch, 1, -1).astype(projected.dtype), keys, values, positions

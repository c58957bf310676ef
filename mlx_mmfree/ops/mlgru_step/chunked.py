"""`mlgru_step` in few operations, on a CPU where the library's kernels cannot run.

Each of MLX's operations costs more there than its arithmetic for one token.
"""

import mlx.core as mx

from ..backend.compilation import fold
from ..linear_scan import linear_scan
from . import Options

ONLY_ON = mx.cpu


def run(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    eps, lower_bound, valid, starts = options
    dims = state.shape[1]
    i, f, g = mx.split(gates.astype(mx.float32), 3, axis=-1)
    # of the shape that it meets, because MLX broadcasts in an operation of its own
    one = mx.ones(f.shape)
    fold(one)
    f = mx.sigmoid(f)
    if lower_bound is not None:
        bound = mx.broadcast_to(lower_bound.astype(mx.float32), f.shape)
        free = one - bound
        fold(bound, free)
        f = bound + free * f
    i = i * mx.sigmoid(i) * (one - f)
    if starts is not None:
        f = mx.where(starts[..., None], 0.0, f)
    if valid is not None:
        f = mx.where(valid[..., None], f, 1.0)
        i = mx.where(valid[..., None], i, 0.0)
    if f.shape[1] == 1:
        h = f * state.astype(mx.float32)[:, None] + i
        last = h[:, 0]
    else:
        h, last = linear_scan(f, i, state)
    norm = mx.broadcast_to(weight.astype(mx.float32), g.shape)
    stats = (*g.shape[:-1], 1)
    share, added = mx.full(stats, 1 / dims), mx.full(stats, eps)
    fold(norm, share, added)
    mean = g.square().sum(axis=-1, keepdims=True) * share
    y = g * mx.rsqrt(mean + added) * norm * (h * mx.sigmoid(h))
    return y.astype(gates.dtype), last

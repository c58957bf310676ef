"""Definition of `mlgru_step`, in terms of the other operations."""

import mlx.core as mx

from ..activate import activate
from ..gated_rms_norm import gated_rms_norm
from ..linear_scan import linear_scan
from . import Options


def run(
    gates: mx.array, state: mx.array, weight: mx.array, options: Options
) -> tuple[mx.array, mx.array]:
    eps, lower_bound, valid, starts = options
    i, f, g = mx.split(gates, 3, axis=-1)
    f = mx.sigmoid(f.astype(mx.float32))
    if lower_bound is not None:
        bound = lower_bound.astype(mx.float32)
        f = bound + (1.0 - bound) * f
    i = activate(i.astype(mx.float32), "silu") * (1.0 - f)
    if starts is not None:
        f = mx.where(starts[..., None], 0.0, f)
    if valid is not None:
        f = mx.where(valid[..., None], f, 1.0)
        i = mx.where(valid[..., None], i, 0.0)
    h, last = linear_scan(f, i, state)
    return gated_rms_norm(g, h, weight, eps=eps), last

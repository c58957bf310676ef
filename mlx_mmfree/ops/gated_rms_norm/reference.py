"""Definition of `gated_rms_norm` in plain operations."""

import mlx.core as mx

from ..activate import activate


def run(gate: mx.array, h: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    normed = mx.fast.rms_norm(gate.astype(mx.float32), weight.astype(mx.float32), eps)
    return (normed * activate(h.astype(mx.float32), "silu")).astype(gate.dtype)

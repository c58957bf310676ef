"""Definition of `rms_norm` in plain operations."""

import mlx.core as mx


def run(x: mx.array, weight: mx.array | None, *, eps: float) -> mx.array:
    weight = None if weight is None else weight.astype(mx.float32)
    return mx.fast.rms_norm(x.astype(mx.float32), weight, eps).astype(x.dtype)

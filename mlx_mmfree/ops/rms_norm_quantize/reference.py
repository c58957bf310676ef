"""Definition of `rms_norm_quantize` in plain operations."""

import mlx.core as mx

from ..straight_through import straight_through

# The float32 just below 0.5. Added to |x| before the floor, it rounds ties away from zero but does not
# round 0.49999997 up.
BELOW_HALF = 0.49999997


def normed(x: mx.array, weight: mx.array | None, eps: float | None) -> mx.array:
    """What is quantised, float32 `(..., D)`."""
    y = x.astype(mx.float32)
    if eps is None:
        return y
    return mx.fast.rms_norm(y, None if weight is None else weight.astype(mx.float32), eps)


def run(
    x: mx.array, weight: mx.array | None, *, eps: float | None, rounding: str
) -> tuple[mx.array, mx.array]:
    y = normed(x, weight, eps)
    largest = mx.max(mx.abs(mx.stop_gradient(y)), axis=-1, keepdims=True)
    scale = 127.0 / mx.maximum(largest, 1e-5)
    scaled = y * scale
    if rounding == "half_away":
        rounded = mx.sign(scaled) * mx.floor(mx.abs(scaled) + BELOW_HALF)
    else:
        rounded = mx.round(scaled)
    return straight_through(mx.clip(rounded, -128.0, 127.0), scaled), scale

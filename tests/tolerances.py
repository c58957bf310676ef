"""The one tolerance table: largest error over largest reference value, by dtype of the result."""

import mlx.core as mx

TOLERANCE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
GRADIENT_TOLERANCE = 1e-4


def relative_error(got: mx.array, want: mx.array) -> float:
    """`max|got - want| / max|want|`, in float32."""
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape} instead of {want.shape}")
    if not want.size:
        return 0.0
    scale = mx.abs(want).max().item()
    return mx.abs(got - want).max().item() / (scale or 1.0)

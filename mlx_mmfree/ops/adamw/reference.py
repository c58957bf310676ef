"""Definition of `adamw` in plain operations."""

import mlx.core as mx


def run(
    parameter: mx.array,
    gradient: mx.array,
    m: mx.array,
    v: mx.array,
    factors: mx.array,
    betas: tuple[float, float],
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    (b1, b2), (decay, numerator, denominator) = betas, factors
    m = b1 * m + (1 - b1) * gradient
    v = b2 * v + (1 - b2) * mx.square(gradient)
    return parameter * decay - numerator * m / (mx.sqrt(v) * denominator + eps), m, v

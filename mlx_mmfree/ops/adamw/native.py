"""`adamw` on the CPU in C++, in one pass that changes arrays in place where nothing else holds them.

A gradient may lie in memory as that of a transposed matrix does.
"""

import mlx.core as mx

from ... import native


def unsupported(
    parameter: mx.array,
    gradient: mx.array,
    m: mx.array,
    v: mx.array,
    factors: mx.array,
    betas: tuple[float, float],
    eps: float,
) -> str | None:
    for array in (parameter, gradient, m, v):
        if array.dtype != mx.float32:
            return f"an argument is {array.dtype}"
    return None


def run(
    parameter: mx.array,
    gradient: mx.array,
    m: mx.array,
    v: mx.array,
    factors: mx.array,
    betas: tuple[float, float],
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    updated: tuple[mx.array, mx.array, mx.array] = native.kernels().adamw(
        parameter, gradient, m, v, factors, *betas, eps
    )
    return updated

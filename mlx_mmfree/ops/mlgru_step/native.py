"""`mlgru_step` on the CPU in C++: gates, state and output in one pass."""

import mlx.core as mx

from ...native import kernels, unavailable
from ..float_dtypes import FLOATS


def unsupported(
    gates: mx.array,
    state: mx.array,
    weight: mx.array,
    *,
    eps: float,
    lower_bound: mx.array | None,
    valid: mx.array | None,
    starts: mx.array | None,
) -> str | None:
    if mx.default_device() != mx.Device(mx.cpu):
        return "the default device is not the CPU"
    if gates.dtype not in FLOATS:
        return f"'gates' are {gates.dtype}"
    if starts is not None:
        return "'starts' are given"
    return unavailable()


def run(
    gates: mx.array,
    state: mx.array,
    weight: mx.array,
    *,
    eps: float,
    lower_bound: mx.array | None,
    valid: mx.array | None,
    starts: mx.array | None,
) -> tuple[mx.array, mx.array]:
    y, last = kernels().mlgru_step(gates, state, weight, eps, lower_bound, valid)
    return y, last

"""`attention` on Metal: MLX's fused kernels, and those of `metal_gradient` while gradients are traced.

Then MLX 0.32 has no fused kernel, and would keep the weights of all keys for each query. It still
computes what the own kernels do not take: fewer than 16 queries, heads of more than 128 dims, a bias
and a mask that is not boolean.
"""

import mlx.core as mx

from ..backend import launch
from ..backend.gradient_tracing import traces_gradients
from . import Mask, fused, metal_gradient


def unsupported(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> str | None:
    if not _is_trained(queries, values, mask, bias):
        return None
    return launch.not_floats(queries, keys, values, sinks) or metal_gradient.fault(
        queries, values, mask, sinks
    )


def run(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: Mask,
    bias: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    if _is_trained(queries, values, mask, bias):
        return metal_gradient.run(queries, keys, values, mask, sinks)
    return fused.run(queries, keys, values, mask, bias, sinks)


def _is_trained(queries: mx.array, values: mx.array, mask: Mask, bias: mx.array | None) -> bool:
    return metal_gradient.takes(queries, values, mask, bias) and traces_gradients()

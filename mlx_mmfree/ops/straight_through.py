"""The straight-through estimator (Bengio et al., arXiv 1308.3432)."""

import mlx.core as mx


def straight_through(quantized: mx.array, x: mx.array) -> mx.array:
    """Returns `quantized` exactly, with the gradient of `x`.

    Written as `stop_gradient(q) + (x - stop_gradient(x))`: the bracket is exactly zero, so the value
    is exactly `q` in every dtype, and ordinary differentiation rules apply under `mx.grad`,
    `mx.vmap` and `mx.compile` in any order.

    Args:
        quantized: The value, of any shape.
        x: What the gradient flows to, same shape.
    """
    return mx.stop_gradient(quantized) + (x - mx.stop_gradient(x))

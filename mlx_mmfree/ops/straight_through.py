"""The straight-through estimator (Bengio et al., arXiv 1308.3432)."""

import mlx.core as mx


def straight_through(quantized: mx.array, x: mx.array) -> mx.array:
    r"""Returns `quantized` exactly, with the gradient of `x`.

    .. math::
        y = \mathrm{stop}(q) + (x - \mathrm{stop}(x))

    The bracket is exactly zero, so the value is exactly `q` in every dtype. The ordinary rules of
    differentiation hold under `mx.grad`, `mx.vmap` and `mx.compile` in any order.

    Source: Bengio et al., arXiv 1308.3432.

    Args:
        quantized: The value, of any shape.
        x: What the gradient flows to, of the same shape.

    Returns:
        `quantized`, with its shape and dtype.

    Example:
        >>> x = mx.array([0.2, 1.7])
        >>> straight_through(mx.round(x), x).tolist()
        [0.0, 2.0]
        >>> mx.grad(lambda x: straight_through(mx.round(x), x).sum())(x).tolist()
        [1.0, 1.0]
    """
    return mx.stop_gradient(quantized) + (x - mx.stop_gradient(x))

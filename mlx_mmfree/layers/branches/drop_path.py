"""Leaves out residual branches in training (stochastic depth, Huang et al., arXiv 1603.09382)."""

import mlx.core as mx
import mlx.nn as nn


class DropPath(nn.Module):
    """In training, a branch is left out for some samples and enlarged for the others; else it stays.

    Args:
        rate: How likely a sample goes without the branch, below 1.

    Shape:
        `x` and `y`: `(B, ...)`.

    Raises:
        ValueError: The rate is no probability below 1.

    Example:
        >>> DropPath(0.1).eval()(mx.ones((1, 2)))
        array([[1, 1]], dtype=float32)
    """

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"[DropPath] 'rate' must be from 0 to below 1 but got {rate!r:.80}.")
        self._rate = rate

    def __call__(self, x: mx.array) -> mx.array:
        if not self.training or not self._rate:
            return x
        kept = mx.random.bernoulli(1 - self._rate, (x.shape[0], *[1] * (x.ndim - 1)))
        return mx.where(kept, x / (1 - self._rate), mx.zeros((), x.dtype))

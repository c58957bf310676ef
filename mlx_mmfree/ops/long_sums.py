"""Sums of many numbers.

On a CPU, MLX adds float32 numbers one after another, so that a sum over 82 million numbers of one sign
loses a third of them. Here numbers are added in blocks, the sums of blocks are added in blocks again,
and so on. The relative error stays at a few roundings, however many numbers there are (Higham, SIAM J.
Sci. Comput. 14, 1993).
"""

from typing import Literal

import mlx.core as mx

BLOCK = 64


def long_sum(x: mx.array, axis: Literal[-1, -2] | None = None) -> mx.array:
    r"""The sum of all numbers, of each row, or of each column, added block by block in float32.

    .. math::
        y = \sum_i x_i

    Args:
        x: Numbers of any shape.
        axis: `None` sums everything, -1 the last axis, and -2 the axis before it.

    Returns:
        float32 `()`, or the shape of `x` without the axis.

    Example:
        >>> long_sum(mx.array([[1.0, 2.0], [3.0, 6.0]]), axis=-2).tolist()
        [4.0, 8.0]
    """
    x = x.astype(mx.float32)
    if axis is None:
        # a dimension has 32 bits
        x = long_sum(x, -1) if x.size >= 2**31 else x
        x = x.reshape(-1)
    along = -1 if axis is None else axis
    reduced = x.ndim + along
    before, after = x.shape[:reduced], x.shape[reduced + 1 :]
    if not x.size:
        # on a CPU, MLX reads sizes out of bounds when it reduces an empty row, and may never end
        return mx.zeros((*before, *after))
    while (count := x.shape[along]) > BLOCK:
        whole = count // BLOCK * BLOCK
        blocks, rest = mx.split(x, [whole], axis=along)
        sums = blocks.reshape(*before, BLOCK, -1, *after).sum(axis=along - 1)
        x = sums if whole == count else mx.concatenate([sums, rest], axis=along)
    return x.sum(axis=along)


def long_mean(x: mx.array) -> mx.array:
    r"""The mean of all numbers, of which `long_sum` takes the sum.

    .. math::
        y = \frac{1}{n} \sum_i x_i

    Args:
        x: Numbers of any shape.

    Returns:
        float32 `()`.

    Example:
        >>> long_mean(mx.array([[1.0, 2.0], [3.0, 6.0]])).item()
        3.0
    """
    return long_sum(x) / x.size


def long_cumsum(x: mx.array) -> mx.array:
    r"""The sums of each number and all before it, :math:`y_j = \sum_{i \le j} x_i`.

    Args:
        x: Numbers `(..., N)`.

    Returns:
        float32 with the shape of `x`.

    Example:
        >>> long_cumsum(mx.array([1.0, 2.0, 3.0])).tolist()
        [1.0, 3.0, 6.0]
    """
    x = x.astype(mx.float32)
    count = x.shape[-1]
    if count <= BLOCK:
        return mx.cumsum(x, axis=-1)
    sums = mx.cumsum(_blocks(x, 0.0), axis=-1)
    whole = sums[..., -1]
    sums = sums + (long_cumsum(whole) - whole)[..., None]
    return sums.reshape(*x.shape[:-1], -1)[..., :count]


def logsumexp(x: mx.array) -> mx.array:
    r"""The logarithm of a sum of exponentials, as of the logits of a large vocabulary.

    .. math::
        y = \log \sum_j e^{x_j}

    Args:
        x: Floats of shape `(..., V)`.

    Returns:
        float32 `(...)`.

    Example:
        >>> round(logsumexp(mx.zeros((100_000,))).item(), 4)
        11.5129
    """
    x = x.astype(mx.float32)
    while x.shape[-1] > BLOCK:
        x = mx.logsumexp(_blocks(x, -mx.inf), axis=-1)
    return mx.logsumexp(x, axis=-1)


def log_softmax(x: mx.array) -> mx.array:
    r"""The logarithms of the probabilities that logits stand for.

    .. math::
        y_j = x_j - \log \sum_i e^{x_i}

    Args:
        x: Floats of shape `(..., V)`.

    Returns:
        float32 `(..., V)`.

    Example:
        >>> [round(n, 4) for n in log_softmax(mx.zeros((4,))).tolist()]
        [-1.3863, -1.3863, -1.3863, -1.3863]
    """
    return x.astype(mx.float32) - logsumexp(x)[..., None]


def _blocks(x: mx.array, padding: float) -> mx.array:
    """The last axis in blocks, `(..., ceil(N / BLOCK), BLOCK)`."""
    missing = -x.shape[-1] % BLOCK
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=padding)
    return x.reshape(*x.shape[:-1], -1, BLOCK)

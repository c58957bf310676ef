"""The convolution of each channel of a map by itself (as in Chollet, arXiv 1610.02357)."""

import mlx.core as mx

from ..backend.dispatch import dispatch


def depthwise_convolution(
    x: mx.array, weight: mx.array, bias: mx.array | None = None, *, stride: int = 1
) -> mx.array:
    r"""Convolves each channel with a window of its own, around every place or every `s`-th.

    .. math::
        y_{i,j,c} = b_c + \sum_{u,v} w_{c,u,v}\,
        x_{s i+u-\lfloor k/2 \rfloor,\,s j+v-\lfloor k/2 \rfloor,\,c}

    with zeros beyond the map. Computed in float32. On the CPU, the gradients of the weight and of the
    bias are sums in float64 of sums over few places.

    Source: as in Chollet, arXiv 1610.02357.

    Args:
        x: Maps `(B, H, W, D)`, any float dtype.
        weight: Windows `(D, k, k, 1)` with `k` odd, any float dtype.
        bias: :math:`b`, `(D,)`, any float dtype; `None` means zeros.
        stride: :math:`s`.

    Returns:
        `(B, H / s, W / s, D)`, rounded up, in the dtype of `x`.

    Raises:
        ValueError: A shape does not fit, or the stride is not positive.

    Example:
        >>> x, weight = mx.ones((1, 3, 3, 1)), mx.ones((1, 3, 3, 1))
        >>> depthwise_convolution(x, weight)[0, :, :, 0].tolist()
        [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
        >>> depthwise_convolution(x, weight, stride=2).shape
        (1, 2, 2, 1)
    """
    check(x, weight, bias, stride)
    if x.size == 0:
        batch, height, width, dims = x.shape
        return mx.zeros((batch, -(-height // stride), -(-width // stride), dims), x.dtype)
    y: mx.array = dispatch(__name__, x, weight, bias, stride)
    return y


def check(x: mx.array, weight: mx.array, bias: mx.array | None, stride: int) -> None:
    """Refuses what `depthwise_convolution` cannot compute, with `ValueError`."""
    side = weight.shape[1] if weight.ndim == 4 else 0
    if x.ndim != 4 or side % 2 == 0 or weight.shape != (x.shape[3], side, side, 1):
        raise ValueError(
            "[depthwise_convolution] 'x' and 'weight' must have shapes (B, H, W, D) and (D, k, k, 1) "
            f"with k odd but got {x.shape} and {weight.shape}."
        )
    if bias is not None and bias.shape != x.shape[3:]:
        raise ValueError(
            f"[depthwise_convolution] 'bias' must have shape {x.shape[3:]} but got {bias.shape}."
        )
    if stride < 1:
        raise ValueError(f"[depthwise_convolution] 'stride' must be positive but got {stride}.")
